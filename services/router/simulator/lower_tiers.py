"""The kvstore nodes of a simulated cluster, one on each worker's host, and all that moves between them and workers.

Write-behind goes through the worker's own link in order, and a part that would come too late is not sent but offered
again with what follows it. A pull's runs follow each other; each waits until its holder has sent what was asked of it
before, as routers count with (`policies.pulls`), and brings what is there by then. Nothing else is shared: the links
of two holders do not slow each other. Time comes in as an argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.blocks import BlockId
from services.common.links import Link
from services.router.domain import PullRun
from services.router.simulator.node_store import NodeStore
from services.router.simulator.worker import SimWorker

# Keys and values of an 8-billion-parameter model with grouped queries (32 layers, 8 heads of 128, two bytes).
KV_BYTES_PER_TOKEN = 131_072
# Write-behind that lags by more than this is not sent.
_MOST_LAG_S = 1.0


@dataclass(frozen=True, slots=True)
class TierProfile:
    """Each node's room in tokens, and its links: that of its RAM, which is also that of a worker's pool, and what its
    SSD adds.
    """

    ram_tokens: int
    ssd_tokens: int
    ram: Link
    ssd: Link


@dataclass(frozen=True, slots=True)
class Pull:
    """end: how many of the prompt's leading blocks are on the worker when it is over, at end_s."""

    end: int
    end_s: float


class LowerTiers:
    """Nodes by number, which are those of their workers."""

    def __init__(self, profile: TierProfile, block_tokens: int, workers: Sequence[SimWorker]) -> None:
        self.profile = profile
        self.stores = [
            NodeStore(profile.ram_tokens // block_tokens, profile.ssd_tokens // block_tokens) for _ in workers
        ]
        self._block_bytes = block_tokens * KV_BYTES_PER_TOKEN
        self._workers = workers
        # When a worker's link has sent all that it was given, and when a holder has.
        self._written_s = [0.0] * len(workers)
        self._read_s: defaultdict[tuple[str, int], float] = defaultdict(float)

    def write(self, number: int, ids: Sequence[BlockId], now_s: float) -> float:
        """Worker `number` has computed a prompt up to `ids`: when the node will have them; inf for never."""
        store, missing = self.stores[number], len(ids)
        while missing and ids[missing - 1] not in store:
            missing -= 1
        if missing == len(ids) or self._written_s[number] > now_s + _MOST_LAG_S:
            return float("inf")
        seconds = (len(ids) - missing) * self._block_bytes / self.profile.ram.bytes_per_s
        self._written_s[number] = max(now_s, self._written_s[number]) + seconds
        return self._written_s[number]

    def pull(self, plan: Sequence[PullRun], ids: Sequence[BlockId], now_s: float) -> Pull:
        """Carry out a plan, of which at least the first run is wanted; `ids` are the prompt's."""
        end, at_s = plan[0].first_block, now_s
        for run in plan:
            last = run.first_block + run.num_blocks
            has, in_ram = self._has(run, ids[:last])
            has = max(end, has)
            on_ssd = has - max(end, min(in_ram, has))
            at_s = self._read(run, has - end - on_ssd, on_ssd, at_s)
            end = has
            if end < last:
                break
        return Pull(end, at_s)

    def _has(self, run: PullRun, ids: Sequence[BlockId]) -> tuple[int, int]:
        number = number_of(run.location_id)
        if run.kind == "worker":
            has = self._workers[number].cache.match(ids)
            return has, has
        store = self.stores[number]
        has, in_ram = store.match(ids)
        store.use(ids[:has])
        return has, in_ram

    def _read(self, run: PullRun, in_ram: int, on_ssd: int, now_s: float) -> float:
        ram, ssd, holder = self.profile.ram, self.profile.ssd, (run.kind, number_of(run.location_id))
        seconds = in_ram * self._block_bytes / ram.bytes_per_s
        if on_ssd:
            seconds += ssd.seconds(on_ssd * self._block_bytes)
        self._read_s[holder] = max(now_s, self._read_s[holder]) + seconds
        return self._read_s[holder] + ram.setup_s


def worker_name(number: int) -> str:
    """A worker's id, and its host's name."""
    return f"w{number}"


def node_name(number: int) -> str:
    """The id of the kvstore node on a worker's host."""
    return f"k{number}"


def number_of(name: str) -> int:
    """Inverse of both."""
    return int(name[1:])
