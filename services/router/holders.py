"""Who could give blocks to a worker that lacks them, for one prompt. Pure.

Locations of the index meet their registry records here: a holder counts only when both have the same epoch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.blocks import BlockId
from services.common.keys import location_key
from services.common.registry import LocationRecord
from services.router.domain import PullRun
from services.router.index.replica import Replica
from services.router.policies.view import IntArray, Sources, no_sources
from services.router.worker_rows import Selection, host_number
from services.router.workers import WorkerTable

# Sources that a decision looks at: those that hold most, of equals those on a candidate's host, then the least busy.
MAX_KVSTORES = 8
MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A location that others could pull from. row: the worker's, -1 for a kvstore."""

    record: LocationRecord
    row: int
    end: int
    memory_end: int


@dataclass(frozen=True, slots=True)
class Holding:
    """Leading blocks of one prompt that are held: by each slot of the index, 0 last; and by each kvstore of any."""

    ids: list[BlockId]
    by_slot: npt.NDArray[np.int32]
    by_kvstore: dict[str, int]


class Holders:
    """Keeps the slots of workers and kvstores current."""

    def __init__(self, replica: Replica, table: WorkerTable, kvstores: Mapping[str, LocationRecord]) -> None:
        """kvstores: records by id, kept current by their owner, who calls `changed`."""
        self._replica = replica
        self._table = table
        self._kvstores = kvstores
        self._kvstore_slots: dict[str, int] = {}
        self._kvstore_hosts: dict[str, int] = {}
        self._version = -1

    def changed(self) -> None:
        """A worker or a kvstore has come, gone or changed its epoch."""
        self._version = -1

    def find(self, ids: list[BlockId]) -> Holding:
        """How much of a prompt every location holds."""
        self._refresh()
        by_slot = self._replica.find(ids).lengths(self._replica.blocks.num_slots + 1)
        by_kvstore = {name: int(by_slot[slot]) for name, slot in self._kvstore_slots.items() if by_slot[slot]}
        return Holding(ids, by_slot, by_kvstore)

    def lengths(self, holding: Holding, at: slice | IntArray) -> IntArray:
        """Leading blocks that the workers in these rows hold."""
        # Slot -1 reads the last element, which is always 0.
        result: IntArray = holding.by_slot[self._table.rows["slot"][at]].astype(np.int64)
        return result

    def sources(
        self, holding: Holding, candidates: Selection, givers: IntArray, *, local_blocks: IntArray, turn: int
    ) -> list[Source]:
        """Who holds more of the prompt than some candidate; equals take turns. givers: rows of workers."""
        least = int(local_blocks[local_blocks.argmin()])
        kvstores = self._kvstore_sources(holding, least, candidates, turn) if holding.by_kvstore else []
        return kvstores + (self._worker_sources(holding, least, givers, turn) if len(givers) else [])

    def _kvstore_sources(self, holding: Holding, least: int, candidates: Selection, turn: int) -> list[Source]:
        names = [name for name, length in holding.by_kvstore.items() if length > least]
        middle = turn % max(1, len(names))
        names = names[middle:] + names[:middle]
        if len(names) > MAX_KVSTORES:
            hosts = set(self._table.rows["host"][candidates.at].tolist())
            far = {name: self._kvstore_hosts[name] not in hosts for name in names}
            names = sorted(names, key=lambda name: (-holding.by_kvstore[name], far[name]))[:MAX_KVSTORES]
        return [self._kvstore_source(name, holding.ids[: holding.by_kvstore[name]]) for name in names]

    def _kvstore_source(self, name: str, held: list[BlockId]) -> Source:
        memory_end = self._memory_end(location_key("kvstore", name), held)
        return Source(self._kvstores[name], -1, len(held), memory_end)

    def _worker_sources(self, holding: Holding, least: int, givers: IntArray, turn: int) -> list[Source]:
        lengths = self.lengths(holding, givers)
        more = (lengths > least).nonzero()[0]
        count = len(more)
        if not count:
            return []
        rows, lengths = givers[more], lengths[more]
        turns = (np.arange(count) + turn) % count
        if count > MAX_WORKERS:
            # Who holds less than enough others is not looked at.
            kept = (lengths >= np.partition(lengths, count - MAX_WORKERS)[count - MAX_WORKERS]).nonzero()[0]
            rows, lengths, turns = rows[kept], lengths[kept], turns[kept]
        table = self._table.rows
        load = table["queued_tokens"][rows] + table["pending_tokens"][rows]
        order = np.lexsort((turns, load, -lengths))[:MAX_WORKERS]
        return [
            Source(self._table.workers[self._table.by_row[row]].record, row, length, length)
            for row, length in zip(rows[order].tolist(), lengths[order].tolist(), strict=True)
        ]

    def arrays(self, sources: list[Source], candidates: Selection) -> Sources:
        """As policies see them."""
        if not sources:
            return no_sources(len(candidates.rows))
        names = [source.record.life for source in sources]
        hosts = np.array([self._host(source) for source in sources], np.int64)
        same_host = hosts[:, None] == self._table.rows["host"][candidates.at]
        links = self._table.links
        return Sources(
            end=np.array([source.end for source in sources], np.int64),
            memory_end=np.array([source.memory_end for source in sources], np.int64),
            queue_bytes=links.queue_bytes(names),
            is_self=np.array([[source.row] for source in sources], np.int64) == candidates.rows,
            links=links.links(candidates.rows, names, same_host, self._table.compute_bytes_per_s(candidates.at)),
        )

    def _host(self, source: Source) -> int:
        if source.row >= 0:
            return int(self._table.rows["host"][source.row])
        return self._kvstore_hosts[source.record.id]

    def _memory_end(self, location: str, ids: list[BlockId]) -> int:
        """How many of the leading `ids`, all held, are not on the SSD. The SSD's follow those in memory."""
        return bisect_left(ids, True, key=lambda id_: self._replica.is_on_ssd(location, id_))

    def _refresh(self) -> None:
        if self._version == self._replica.version:
            return
        self._version = self._replica.version
        for worker_id, worker in self._table.workers.items():
            self._table.rows["slot"][worker.row] = self._slot("worker", worker_id, worker.record.epoch)
        slots = {name: self._slot("kvstore", name, record.epoch) for name, record in self._kvstores.items()}
        self._kvstore_slots = {name: slot for name, slot in slots.items() if slot >= 0}
        self._kvstore_hosts = {name: host_number(self._kvstores[name].host) for name in self._kvstore_slots}

    def _slot(self, kind: str, name: str, epoch: int) -> int:
        location = self._replica.locations.get(location_key(kind, name))
        return location.slot if location is not None and location.epoch == epoch else -1


def pull_run(source: Source, first: int, end: int) -> PullRun:
    """Blocks [first, end) from `source`."""
    record = source.record
    return PullRun(
        kind=record.kind,
        location_id=record.id,
        epoch=record.epoch,
        pull_address=record.pull_address,
        grpc_address=record.transfer_grpc_address or record.grpc_address,
        first_block=first,
        num_blocks=end - first,
        num_ssd_blocks=max(0, end - max(first, source.memory_end)),
    )
