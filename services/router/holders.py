"""Who could give blocks to a worker that lacks them, for one prompt. Pure.

Locations of the index meet their registry records here: a holder counts only when both have the same epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.common.blocks import BlockId
from services.common.registry import LocationRecord
from services.router.domain import PullRun, WorkerId
from services.router.index.replica import Replica
from services.router.policies.view import IntArray
from services.router.workers import WorkerTable


@dataclass(frozen=True, slots=True)
class Holding:
    """Leading blocks of one prompt: held by each worker row, and by each kvstore that holds any."""

    by_row: IntArray
    by_kvstore: dict[str, int]

    @property
    def best_kvstore(self) -> int:
        """Most leading blocks that one kvstore holds."""
        return max(self.by_kvstore.values(), default=0)

    def best_other(self, usable_rows: IntArray, rows: IntArray) -> IntArray:
        """For each of `rows`, the most leading blocks held by one of `usable_rows` other than itself."""
        held = np.zeros(len(self.by_row), np.int64)
        held[usable_rows] = self.by_row[usable_rows]
        if not held.any():
            return np.zeros(len(rows), np.int64)
        best = int(held.argmax())
        first = held[best]
        held[best] = 0
        result: IntArray = np.where(rows == best, held.max(), first)
        return result


class Holders:
    """Keeps the slots of workers and kvstores current."""

    def __init__(self, replica: Replica, table: WorkerTable, kvstores: Mapping[str, LocationRecord]) -> None:
        """kvstores: records by id, kept current by their owner, who calls `changed`."""
        self._replica = replica
        self._table = table
        self._kvstores = kvstores
        self._kvstore_slots: dict[str, int] = {}
        self._version = -1

    def changed(self) -> None:
        """A worker or a kvstore has come, gone or changed its epoch."""
        self._version = -1

    def find(self, ids: list[BlockId]) -> Holding:
        """How much of a prompt every location holds."""
        self._refresh()
        lengths = np.zeros(self._replica.blocks.num_slots + 1, np.int64)
        lengths[:-1] = self._replica.find(ids).lengths(len(lengths) - 1)
        # Slot -1 reads the last element, which is always 0.
        by_row = lengths[self._table.rows["slot"]]
        by_row[~self._table.rows["live"]] = 0
        by_kvstore = {name: int(lengths[slot]) for name, slot in self._kvstore_slots.items() if lengths[slot]}
        return Holding(by_row, by_kvstore)

    def runs(
        self, holding: Holding, segments: list[tuple[str, int, int]], *, row: int, usable_rows: IntArray, turn: int
    ) -> list[PullRun]:
        """Holders for the (kind, first block, end block) segments that worker `row` is to pull.

        Among several that hold a segment: one on the same host, then the least busy one, then by `turn`.
        """
        here = self._table.workers[self._table.by_row[row]].record.host
        runs = []
        for kind, first, end in segments:
            records = (
                self._kvstores_with(holding, end)
                if kind == "kvstore"
                else self._workers_with(holding, end, usable_rows[usable_rows != row])
            )
            if not records:
                break
            nearest = [record for record in records if record.host == here] or records
            runs.append(_run(nearest[turn % len(nearest)], first, end))
        return runs

    def _kvstores_with(self, holding: Holding, end: int) -> list[LocationRecord]:
        return [self._kvstores[name] for name, length in holding.by_kvstore.items() if length >= end]

    def _workers_with(self, holding: Holding, end: int, rows: IntArray) -> list[LocationRecord]:
        holding_rows = rows[holding.by_row[rows] >= end]
        if not len(holding_rows):
            return []
        table = self._table.rows[holding_rows]
        busy = table["queued_tokens"] + table["pending_tokens"]
        return [self._table.workers[self._table.by_row[int(row)]].record for row in holding_rows[busy == busy.min()]]

    def _refresh(self) -> None:
        if self._version == self._replica.version:
            return
        self._version = self._replica.version
        for worker_id, worker in self._table.workers.items():
            self._table.rows["slot"][worker.row] = self._slot(f"worker/{WorkerId(worker_id)}", worker.record.epoch)
        slots = {name: self._slot(f"kvstore/{name}", record.epoch) for name, record in self._kvstores.items()}
        self._kvstore_slots = {name: slot for name, slot in slots.items() if slot >= 0}

    def _slot(self, location_name: str, epoch: int) -> int:
        location = self._replica.locations.get(location_name)
        return location.slot if location is not None and location.epoch == epoch else -1


def _run(record: LocationRecord, first: int, end: int) -> PullRun:
    return PullRun(
        kind=record.kind,
        location_id=record.id,
        epoch=record.epoch,
        pull_address=record.pull_address,
        grpc_address=record.transfer_grpc_address or record.grpc_address,
        first_block=first,
        num_blocks=end - first,
    )
