"""Measuring a path of `bench.kv`: rounds of calls, and the row of the table that comes of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.kv_node import cpu_seconds, read_bytes_of
from bench.kv_paths import Cell, Fetch, Seen, ShortAnswer
from services.common.transfer.errors import TransferError

MIN_CALLS = 3
# A busy machine may keep a process silent for longer than a peer waits, and a node whose RAM is lent out answers short.
_MAX_FAILED = 3
# A read counts as cold when so much of it came from the disk.
_COLD_SHARE = 0.99
Row = dict[str, Any]


@dataclass(slots=True)
class Samples:
    """A rate, CPU time and disk reads for each round, and the time of every call."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    disk_share: list[float] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)

    def quantile_us(self, share: float) -> float:
        """Time that this share of the calls did not exceed."""
        ordered = sorted(self.calls_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class Measured:
    """One path in one cell. pids: the processes whose CPU time counts beside this one's; the first reads the disk.

    tier: ram or ssd. cache: cold, warm or empty; what is said to be cold is shown to have come from the disk.
    """

    transport: str
    cell: Cell
    fetch: Fetch
    pids: Sequence[int] = ()
    tier: str = "ram"
    cache: str = ""
    verified: bool = False
    is_ceiling: bool = False
    seen: Seen = field(default_factory=Seen)
    samples: Samples = field(default_factory=Samples)
    failed: int = 0

    async def call(self) -> None:
        """One call; it is made again when it fails, and the time of both counts. Raises the last of many errors."""
        while True:
            try:
                return await self.fetch()
            except (TransferError, ShortAnswer):
                self.failed += 1
                if self.failed > _MAX_FAILED:
                    raise

    async def run_round(self, seconds: float) -> None:
        """Call for so long, and not less often than MIN_CALLS."""
        cpu_s, disk_bytes = self._cpu_s(), self._disk_bytes()
        started_s = before_s = time.perf_counter()
        calls = 0
        while before_s < started_s + seconds or calls < MIN_CALLS:
            await self.call()
            after_s = time.perf_counter()
            self.samples.calls_us.append((after_s - before_s) * 1e6)
            before_s = after_s
            calls += 1
        num_bytes = calls * self.cell.num_bytes
        self.samples.gb_per_s.append(num_bytes / 1e9 / (before_s - started_s))
        self.samples.cpu_s_per_gb.append((self._cpu_s() - cpu_s) / (num_bytes / 1e9))
        self.samples.disk_share.append((self._disk_bytes() - disk_bytes) / num_bytes)

    def row(self) -> Row:
        """What was measured."""
        samples = self.samples
        found: Row = {
            "block_bytes": self.cell.block_bytes,
            "tier": self.tier,
            "transport": self.transport,
            "same_host": True,
            "in_flight": self.cell.in_flight,
            "verified": self.verified,
            "ceiling": self.is_ceiling,
            "gb_per_s": round(statistics.median(samples.gb_per_s), 3),
            "p50_us": round(samples.quantile_us(0.5), 1),
            "p99_us": round(samples.quantile_us(0.99), 1),
            "cpu_s_per_gb": round(statistics.median(samples.cpu_s_per_gb), 3),
        }
        if self.failed:
            found["failed"] = self.failed
        if self.cache:
            found["cache"] = self._shown_cache()
            found["disk_share"] = round(min(samples.disk_share), 3)
        if self.seen.tiers:
            found["path"] = "+".join(sorted(self.seen.paths))
            found["served_from"] = "+".join(sorted(self.seen.tiers))
        return found

    def _shown_cache(self) -> str:
        is_cold = min(self.samples.disk_share) >= _COLD_SHARE and self.seen.tiers <= {"ssd"}
        return "not shown to be cold" if self.cache == "cold" and not is_cold else self.cache

    def _cpu_s(self) -> float:
        return time.process_time() + sum(cpu_seconds(pid) for pid in self.pids)

    def _disk_bytes(self) -> int:
        if not self.cache:
            return 0
        return read_bytes_of(self.pids[0] if self.pids else 0)
