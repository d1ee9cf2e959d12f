"""Resident memory of processes over time, from /proc (Linux), and how much of it a load has added.

Private memory (RssAnon) is told apart from all that is resident: blocks of KV caches lie in shared memory, which is
resident once it is used and whose size is a setting.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# What a heap may have grown in the second half of a run, when everything that is bounded is full: both of them.
_LEAK_MIB, _LEAK_SHARE = 8.0, 0.02
# Of a run, at its middle and at its end, what one figure is the median of: the heap of a process rises and falls.
_WINDOW_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of one process at one moment. private: what is neither shared nor of a file."""

    resident: float
    private: float

    @staticmethod
    def of(pid: int) -> Memory:
        """Raises OSError when it is gone."""
        found = numbers_of(Path(f"/proc/{pid}/status"))
        # A process that is just ending has no memory any more.
        return Memory(found.get("VmRSS", 0) / 1024, found.get("RssAnon", 0) / 1024)


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process in one run, in MiB."""

    resident_start: float
    resident_end: float
    private_start: float
    private_middle: float
    private_end: float

    @property
    def late(self) -> float:
        """Private MiB added in the second half."""
        return self.private_end - self.private_middle

    @property
    def late_share(self) -> float:
        """The same, of what there was in the middle."""
        return self.late / self.private_middle if self.private_middle else 0.0

    @property
    def is_leak(self) -> bool:
        """Whether that is more than a heap's rise and fall."""
        return self.late > _LEAK_MIB and self.late_share > _LEAK_SHARE


@dataclass(slots=True)
class MemoryLog:
    """Samples by the name of a process, those of one moment together."""

    samples: dict[str, list[Memory]] = field(default_factory=dict)

    def take(self, pids: Mapping[str, int]) -> None:
        """One of each that is there."""
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                now = Memory.of(pid)
                self.samples.setdefault(name, []).append(now)

    def growth(self) -> dict[str, Growth]:
        """Of each process."""
        return {name: _growth(taken) for name, taken in self.samples.items()}


def numbers_of(path: Path) -> dict[str, int]:
    """The numbers of a file of `name: number` lines. Raises OSError."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _growth(taken: list[Memory]) -> Growth:
    window = max(1, round(len(taken) * _WINDOW_SHARE))
    at = (len(taken) - window) // 2
    middle, end = taken[at : at + window], taken[-window:]
    return Growth(
        resident_start=taken[0].resident,
        resident_end=statistics.median(one.resident for one in end),
        private_start=taken[0].private,
        private_middle=statistics.median(one.private for one in middle),
        private_end=statistics.median(one.private for one in end),
    )
