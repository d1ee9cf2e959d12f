"""The router's index under the workload of `router_workload`: lookups, announcements, memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.router_workload import CHANGING, SMALL_BATCH, Workload, build, kinds, quantiles_us, resident_bytes
from services.common.announcements import Header, Kind, Tier, pack_adds, unpack_adds, unpack_xor
from services.common.blocks import BlockId
from services.router.index.replica import Applied, Replica

_ROOT = Path(__file__).parent.parent
# As they come from the stream: header and packed entries.
Message = tuple[bytes, bytes]
_PEER_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Find:
    """One kind of lookup: of which prompts (see router_workload), of so many blocks."""

    prompt: str
    num_blocks: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """entries: (block, location) pairs. announcements_per_s: of 4 blocks each; blocks_per_s: in full batches."""

    entries: int
    blocks_per_s: float
    announcements_per_s: float
    bytes_per_block: float
    finds: list[Find]


class Announced:
    """One location's announcements, with their running digest."""

    def __init__(self) -> None:
        self._count = self._xor = self._seq = 0

    def message(self, ids: list[bytes]) -> Message:
        """The next one adds `ids`."""
        kind = Kind.CHANGE if self._seq else Kind.STAGED | Kind.BEGIN | Kind.COMMIT
        for id_ in ids:
            self._xor ^= unpack_xor(id_)
        self._count += len(ids)
        self._seq += 1
        adds = pack_adds([(BlockId(id_), Tier.HBM) for id_ in ids])
        return Header(1, self._seq, kind, self._count, self._xor).pack(), adds


def apply(replica: Replica, name: str, messages: list[Message]) -> float:
    """Take messages in as the follower does; seconds of it. Raises ValueError when one does not apply."""
    began_s = time.perf_counter()
    results = {replica.apply(name, Header.unpack(header), unpack_adds(adds), []) for header, adds in messages}
    seconds = time.perf_counter() - began_s
    if results - {Applied.YES}:
        raise ValueError(f"announcements were answered with {results}")
    return seconds


def fill(replica: Replica, workload: Workload) -> tuple[list[Announced], int, float]:
    """Announce everything; of each location what it has announced, then entries and seconds of all."""
    everybody = [Announced() for _ in workload.held]
    entries, seconds = 0, 0.0
    for location, announced in enumerate(everybody):
        parts = [ids for _, ids in workload.parts(location)]
        seconds += apply(replica, f"worker/w{location}", [announced.message(ids) for ids in parts])
        entries += sum(map(len, parts))
    return everybody, entries, seconds


class Growth:
    """Locations that take one more block of the trunk each time."""

    def __init__(self, replica: Replica, workload: Workload, everybody: list[Announced], count: int) -> None:
        self._replica, self._everybody = replica, everybody
        self._changes = workload.growth(count)

    def __call__(self) -> None:
        """The next one."""
        location, _, id_ = next(self._changes)
        apply(self._replica, f"worker/w{location}", [self._everybody[location].message([id_])])


def _small_announcements(replica: Replica, workload: Workload, count: int) -> float:
    """Announcements of a few blocks each, as while serving, of locations that are new; how many a second."""
    chain, seconds, done = workload.chains[0], 0.0, 0
    while done < count:
        announced = Announced()
        messages = [announced.message(chain[at : at + SMALL_BATCH]) for at in range(0, len(chain), SMALL_BATCH)]
        seconds += apply(replica, f"worker/new{done}", messages)
        done += len(messages)
    return done / seconds


def measure(
    num_locations: int, num_blocks: int, samples: int, lengths: list[int], *, cpu_time: bool = False
) -> IndexFigures:
    """Figures of the router's index; run it in a process of its own, so that memory is that of this index."""
    workload = build(num_locations, num_blocks)
    before_bytes = resident_bytes()
    replica = Replica()
    everybody, entries, seconds = fill(replica, workload)
    held_bytes = resident_bytes() - before_bytes
    # The router freezes nothing, but has no other objects of this number either.
    gc.freeze()
    growth = Growth(replica, workload, everybody, samples)
    finds = [
        Find(
            prompt,
            length,
            *quantiles_us(
                lambda ids: replica.find(ids).lengths(replica.blocks.num_slots),
                _prompts(workload, prompt, length, samples),
                cpu_time=cpu_time,
                before_each=growth if prompt == CHANGING else lambda: None,
            ),
        )
        for prompt, length in kinds(lengths)
    ]
    small = _small_announcements(replica, workload, 20_000)
    return IndexFigures(entries, entries / seconds, small, held_bytes / workload.num_blocks, finds)


def measure_dynamo(
    venv: Path, num_locations: int, num_blocks: int, samples: int, lengths: list[int], *, cpu_time: bool = False
) -> IndexFigures:
    """The same of Dynamo's, in the environment `venv`. Raises CalledProcessError or TimeoutExpired."""
    numbers = [str(number) for number in (num_locations, num_blocks, samples, *lengths)]
    ran = subprocess.run(
        [venv / "bin" / "python", "-m", "bench.router_dynamo", "cpu" if cpu_time else "wall", *numbers],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        cwd=_ROOT,
        check=True,
        capture_output=True,
        timeout=_PEER_DEADLINE_S,
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return IndexFigures(**{**found, "finds": [Find(*one) for one in found["finds"]]})


def _prompts(workload: Workload, prompt: str, length: int, samples: int) -> list[list[BlockId]]:
    return [[BlockId(id_) for id_ in ids] for ids in workload.prompts(prompt, length, samples)]
