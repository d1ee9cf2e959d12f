"""The view of the workers: what each last reported, and what this router granted since.

Pure and synchronous; time comes in as an argument. One row of an array for each worker, so that a decision scores all
of them at once. A grant counts as load until a report shows it, its end is told, or `pending_timeout_s` passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from services.common.fair_queue import NUM_CLASSES, class_index
from services.common.own_pauses import OwnPauses
from services.common.registry import LocationRecord
from services.common.step_costs import assumed_costs
from services.router.domain import AttemptId, Identity, Load, WorkerId
from services.router.link_table import LinkTable
from services.router.policies.view import AdapterLoads, FloatArray, IntArray, Pressure
from services.router.recent_work import BUCKET_S, NUM_BUCKETS, RecentWork
from services.router.roll_call import SUSPECT_S, BoolArray, Present, RollCall, serving, suspect
from services.router.worker_rows import RowStore, Selection, host_number, name_hash
from services.router.worker_state import (
    COST_NAMES,
    DEFAULT_DECODE_STEP_S,
    DEFAULT_PREFILL_TOKENS_PER_S,
    PendingAttempt,
    Worker,
    costs_of,
    learned,
)

# A step may take this many times its expected duration before it counts as standing still.
_SLOW_STEPS = 4.0
# Buckets of recent work that show the present load.
_LATELY = 3
_NO_CLASS = (0,) * NUM_CLASSES


class WorkerTable:
    """All known workers. Rows of forgotten ones are used again."""

    def __init__(self, *, pending_timeout_s: float) -> None:
        self._pending_timeout_s = pending_timeout_s
        self._rows = RowStore(16)
        self._roll_call = RollCall()
        self._free: list[int] = list(range(16))[::-1]
        self._models: dict[tuple[str, bytes], int] = {}
        self._pauses = OwnPauses()
        self._drains: Mapping[str, int] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.by_row: dict[int, WorkerId] = {}
        self.links = LinkTable()
        self.recent = RecentWork()
        self.pending_timeouts = 0

    @property
    def rows(self) -> RowStore:
        """Every row, those in use have `live` set. Only this class writes, but for `slot`."""
        return self._rows

    def model_number(self, name: str, digest: bytes) -> int:
        """Number of a model in the rows; -1 when no worker ever had it."""
        return self._models.get((name, digest), -1)

    def add(self, record: LocationRecord) -> Worker:
        """Know a worker from its registry record; its state starts anew when the epoch is another."""
        worker_id = WorkerId(record.id)
        known = self.workers.get(worker_id)
        if known is not None and known.record.epoch == record.epoch:
            known.record = record
            self._rows["host"][known.row] = host_number(record.host)
            return known
        self.forget(worker_id)
        worker = Worker(record, self._new_row())
        self.workers[worker_id] = worker
        self.by_row[worker.row] = worker_id
        self._set(
            worker.row,
            live=True,
            host=host_number(record.host),
            serves_pulls=bool(record.pull_address or record.transfer_grpc_address),
            slot=-1,
            pace=1.0,
            model=-1,
            drained=self._drains.get(record.id) == record.epoch,
            name_hash=name_hash(record.id),
        )
        self._roll_call.changed()
        return worker

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker and what is pending on it."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            for key in list(worker.pending):
                self._end_pending(worker, key)
            self.links.forget(worker.row)
            self.recent.forget(worker.row)
            del self.by_row[worker.row]
            self._rows.clear(worker.row)
            self._free.append(worker.row)
            self._roll_call.changed()

    def set_drains(self, epochs: Mapping[str, int]) -> None:
        """Workers that operators have drained, each until it starts anew: they take no new requests."""
        self._drains = epochs
        for worker_id, worker in self.workers.items():
            self._rows["drained"][worker.row] = epochs.get(worker_id) == worker.record.epoch
        self._roll_call.changed()

    def identify(self, worker_id: WorkerId, identity: Identity, now_s: float) -> None:
        """A Watch stream has begun."""
        worker = self.workers[worker_id]
        worker.identity = identity
        worker.progress = -1
        prefill_tokens_per_s = identity.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
        decode_step_s = identity.decode_step_s or DEFAULT_DECODE_STEP_S
        step_tokens = max(1, identity.step_token_budget)
        costs = assumed_costs(prefill_tokens_per_s, decode_step_s)
        self._set(
            worker.row,
            model=self._models.setdefault((identity.model, identity.model_digest), len(self._models)),
            context_length=identity.context_length,
            runs_whole=identity.role != "prefill",
            block_tokens=max(1, identity.block_tokens),
            block_bytes=max(1, identity.block_bytes),
            total_blocks=identity.total_blocks,
            step_token_budget=step_tokens,
            step_tokens=step_tokens,
            max_running=max(1, identity.max_running_requests),
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_step_s=decode_step_s,
            benchmark_prefill_tokens_per_s=prefill_tokens_per_s,
            benchmark_decode_step_s=decode_step_s,
            promised_tpot_s=worker.promises.tightest_s(),
            **dict(zip(COST_NAMES, costs_of(costs), strict=True)),
            least_step_s=decode_step_s,
            moved_s=now_s,
            reported_s=now_s,
            told_s=now_s,
        )
        self._roll_call.changed()

    def report(self, worker_id: WorkerId, load: Load, now_s: float, *, silent_s: float = 0.0) -> None:
        """A Watch stream has brought a load; the worker must have been identified.

        silent_s: for which one of its processes had said nothing, so that the sign of life is as old.
        """
        worker = self.workers[worker_id]
        rows, row = self._rows, worker.row
        has_work = load.running_requests + load.waiting_requests > 0
        told_s = moved_s = now_s
        if load.progress == worker.progress:
            told_s = float(rows["told_s"][row])
            moved_s = float(rows["moved_s"][row]) if has_work else now_s
        worker.progress = load.progress
        worker.adapters.told(load)
        self._attempts_shown(worker, load, has_work=has_work)
        speed = learned(self._rows, worker, load)
        stall_limit_s = max(SUSPECT_S, _SLOW_STEPS * float(rows["step_token_budget"][row]) / speed[0])
        rows.block("reported_s", "promised_tpot_s")[:, row] = (
            *(now_s - silent_s, told_s, moved_s, stall_limit_s),
            *(load.running_requests, load.waiting_requests, load.queued_prefill_tokens, load.queued_prefill_pairs),
            *(load.waiting_prefill_tokens or _NO_CLASS),
            *(load.decoding_sequences, load.context_tokens, load.free_blocks, load.cached_blocks),
            *speed,
            worker.promises.tightest_s(),
        )
        self._count_pending(worker, now_s)
        stalls_at_s = moved_s + stall_limit_s if has_work else math.inf
        self._roll_call.heard(row, suspect_at_s=min(now_s - silent_s + SUSPECT_S, stalls_at_s))
        self._open(row, ready=load.ready, draining=load.draining)
        self.links.report(row, load.holders)

    def alive(self, rows: IntArray, now_s: float) -> None:
        """The workers in `rows` have reported and made progress, and nothing else of them has changed."""
        self._rows["reported_s"][rows] = self._rows["moved_s"][rows] = now_s
        self._roll_call.changed()

    def broken(self, worker_id: WorkerId) -> None:
        """The Watch stream of a worker has broken: it is suspect until another brings a report."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._rows["up"][worker.row] = False
            self._roll_call.changed()

    def grant(self, worker_id: WorkerId, attempt: AttemptId, pending: PendingAttempt) -> None:
        """Count a grant as load."""
        worker = self.workers[worker_id]
        self._end_pending(worker, str(attempt))
        worker.pending[str(attempt)] = pending
        self.recent.add(worker.row, pending.granted_s, work_s=pending.work_s, prefill_s=pending.prefill_s)
        self.links.add(pending.pulls)
        worker.promises.make(str(attempt), pending.tpot_s)
        self._rows["promised_tpot_s"][worker.row] = worker.promises.tightest_s()
        self._count_pending(worker, pending.granted_s)

    def end(self, worker_id: WorkerId, attempt: AttemptId, now_s: float) -> None:
        """An attempt has ended, whether or not a report has shown it."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.promises.end([str(attempt)])
        self._rows["promised_tpot_s"][worker.row] = worker.promises.tightest_s()
        if self._end_pending(worker, str(attempt)):
            self._count_pending(worker, now_s)

    def paced(self, worker_id: WorkerId, log_ratio: float, now_s: float) -> None:
        """A request on this worker took exp(log_ratio) times what was expected."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._rows["pace"][worker.row] = worker.pace.observe(log_ratio, now_s)

    def suspect(self, now_s: float) -> BoolArray:
        """Of each row, whether its worker gets no new work for want of life signs."""
        return suspect(self._rows, now_s - self._pauses.excused_s(now_s))

    def serving(self, now_s: float) -> BoolArray:
        """Of each row, whether its worker takes new requests."""
        return serving(self._rows, self.suspect(now_s))

    def present(self, now_s: float) -> Present:
        """Who takes requests; to be used before anything changes."""
        return self._roll_call.present(self._rows, now_s - self._pauses.excused_s(now_s))

    def compute_bytes_per_s(self, at: slice | IntArray) -> FloatArray:
        """Bytes of blocks that these workers would compute in a second."""
        rows = self.rows
        result: FloatArray = rows["block_bytes"][at] * rows["prefill_tokens_per_s"][at] / rows["block_tokens"][at]
        return result

    def pressure(self, candidates: Selection, now_s: float, *, reuse: float) -> Pressure:
        """What these rows have had to do of late; reuse: see Pressure."""
        window, lately = (self.recent.totals(candidates, now_s, num_buckets=count) for count in (NUM_BUCKETS, _LATELY))
        # A router that has just begun has seen too little to know.
        lasted_s = max(lately.lasted_s, BUCKET_S)
        prefill_share = lately.prefill_s / lasted_s
        return Pressure(
            window_s=window.work_s,
            prefill_share=prefill_share,
            utilisation=float(prefill_share.mean()),
            arrivals_per_s=float(lately.grants.mean()) / lasted_s,
            reuse=reuse,
        )

    def adapter_loads(self, rows: IntArray, digest: bytes, now_s: float) -> AdapterLoads:
        """What it takes the workers in `rows` to have an adapter loaded."""
        known = [self.workers[self.by_row[row]].adapters for row in rows.tolist()]
        return AdapterLoads(
            load_s=np.array([one.load_s(digest, now_s) for one in known], np.float64),
            is_full=np.array([one.is_full(digest, now_s) for one in known], np.bool_),
        )

    def tick(self, now_s: float) -> None:
        """Call every `TICK_S`: stop counting grants that no report has shown for too long, notice own pauses."""
        self._pauses.tick(now_s)
        for worker in self.workers.values():
            if worker.pending:
                self._count_pending(worker, now_s)

    def _set(self, row: int, **values: float) -> None:
        for name, value in values.items():
            self._rows[name][row] = value

    def _open(self, row: int, *, ready: bool, draining: bool) -> None:
        """The worker's own word on whether it takes requests."""
        rows = self._rows
        if not rows["up"][row] or rows["ready"][row] != ready or rows["draining"][row] != draining:
            self._set(row, up=True, ready=ready, draining=draining)
            self._roll_call.changed()

    def _attempts_shown(self, worker: Worker, load: Load, *, has_work: bool) -> None:
        if load.admitted or load.ended:
            names = (*load.admitted, *load.ended)
            worker.shown.add(names)
            for key in names:
                self._end_pending(worker, key)
            worker.promises.end(load.ended)
        if not has_work:
            worker.promises.end_all_but(worker.pending)

    def _end_pending(self, worker: Worker, key: str) -> bool:
        """A grant counts no more; whether it did."""
        pending = worker.pending.pop(key, None)
        if pending is None:
            return False
        self.links.release(pending.pulls)
        return True

    def _count_pending(self, worker: Worker, now_s: float) -> None:
        rows, row = self._rows, worker.row
        if not worker.pending and not rows["pending"][row]:
            return
        self._end_overdue(worker, now_s)
        tokens, blocks, pairs, by_class = 0, 0, 0.0, [0] * NUM_CLASSES
        for attempt in worker.pending.values():
            tokens += attempt.tokens
            blocks += attempt.blocks
            pairs += attempt.pairs
            by_class[class_index(attempt.priority)] += attempt.tokens
        rows.block("pending", "pending_by_class")[:, row] = (len(worker.pending), tokens, blocks, pairs, *by_class)

    def _end_overdue(self, worker: Worker, now_s: float) -> None:
        """A worker that never has a request keeps no promise to it."""
        most_s = self._pending_timeout_s
        overdue = [key for key, attempt in worker.pending.items() if now_s - attempt.granted_s > most_s]
        if overdue:
            for key in overdue:
                self._end_pending(worker, key)
            worker.promises.end(overdue)
            self._rows["promised_tpot_s"][worker.row] = worker.promises.tightest_s()
            self.pending_timeouts += len(overdue)

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._rows)
            self._rows.grow(2 * size)
            self._free = list(range(size, 2 * size))[::-1]
        return self._free.pop()
