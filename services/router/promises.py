"""The pace that a worker's present requests were promised: what joins them must not slow them below it. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Promises:
    """One worker's: the TPOT objective of each attempt that was granted with one, until it ends."""

    _tpot_s: dict[str, float] = field(default_factory=dict)

    def make(self, attempt: str, tpot_s: float) -> None:
        """tpot_s: 0 for no objective."""
        if tpot_s > 0:
            self._tpot_s[attempt] = tpot_s

    def end(self, attempts: Iterable[str]) -> None:
        """These have ended, promised or not."""
        for attempt in attempts:
            self._tpot_s.pop(attempt, None)

    def end_all_but(self, attempts: Container[str]) -> None:
        """The worker has none but these."""
        self.end([attempt for attempt in self._tpot_s if attempt not in attempts])

    def tightest_s(self) -> float:
        """The least of them; inf when there is none."""
        return min(self._tpot_s.values(), default=math.inf)
