"""The view of the workers: what each last reported, and what this router granted since.

Pure and synchronous; time comes in as an argument. One row of an array for each worker, so that a decision scores all
of them at once. A grant counts as load until a report shows it, its end is told, or `pending_timeout_s` passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from services.common.fair_queue import NUM_CLASSES, class_index
from services.common.registry import LocationRecord
from services.common.step_costs import StepCosts, assumed_costs
from services.router.calibration import Pace
from services.router.domain import AttemptId, Identity, Load, Placement, WorkerId
from services.router.link_table import LinkTable
from services.router.own_pauses import OwnPauses
from services.router.policies.view import WORKER_ROW, IntArray, Pressure, WorkerRows
from services.router.promises import Promises
from services.router.rates import StepSlope
from services.router.recent_names import RecentNames
from services.router.recent_work import BUCKET_S, NUM_BUCKETS, RecentWork

# A worker whose reports or whose steps (while it has work) stand still for this long is suspect.
SUSPECT_S = 1.0
# A step may take this many times its expected duration before it counts as standing still.
_SLOW_STEPS = 4.0
# Buckets of recent work that show the present load.
_LATELY = 3
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_DECODE_STEP_S = 0.03


@dataclass(slots=True)
class PendingAttempt:
    """A grant that no report shows yet; pulls: bytes that it is to pull, by holder.

    pairs: of its prompt's tokens with those before them. work_s, prefill_s: all that the worker will have to do for it,
    and the prompt's part. priority: a PriorityClass, 0 counting as the most urgent. tpot_s: its objective, 0 for none.
    """

    tokens: int
    blocks: int
    granted_s: float
    pulls: tuple[tuple[str, float], ...] = ()
    pairs: float = 0.0
    work_s: float = 0.0
    prefill_s: float = 0.0
    priority: int = 0
    tpot_s: float = 0.0

    @classmethod
    def of(cls, placement: Placement, granted_s: float, *, priority: int = 0, tpot_s: float = 0.0) -> PendingAttempt:
        """What a placement adds to its worker's load."""
        return cls(
            tokens=placement.prefill_tokens,
            blocks=placement.num_blocks,
            granted_s=granted_s,
            pulls=placement.pulled_bytes,
            pairs=placement.prefill_pairs,
            work_s=placement.work_s,
            prefill_s=placement.prefill_s,
            priority=priority,
            tpot_s=tpot_s,
        )


@dataclass(slots=True)
class Worker:
    """What the row cannot hold."""

    record: LocationRecord
    row: int
    identity: Identity | None = None
    progress: int = -1
    pending: dict[str, PendingAttempt] = field(default_factory=dict)
    slope: StepSlope = field(default_factory=StepSlope)
    pace: Pace = field(default_factory=Pace)
    # Attempts that reports have lately shown to be admitted or ended.
    shown: RecentNames = field(default_factory=RecentNames)
    promises: Promises = field(default_factory=Promises)


_COST_NAMES = tuple(each.name for each in fields(StepCosts))


def _set_costs(row: np.void, costs: StepCosts, *, least_step_s: float) -> None:
    row["least_step_s"] = least_step_s
    for name in _COST_NAMES:
        row[name] = getattr(costs, name)


def host_number(host: str) -> int:
    """A host's number in the rows."""
    return int.from_bytes(blake2b(host.encode(), digest_size=8).digest(), "little", signed=True)


class WorkerTable:
    """All known workers. Rows of forgotten ones are used again."""

    def __init__(self, *, pending_timeout_s: float) -> None:
        self._pending_timeout_s = pending_timeout_s
        self._rows: WorkerRows = np.zeros(16, WORKER_ROW)
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
    def rows(self) -> WorkerRows:
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
            self._rows[known.row]["host"] = host_number(record.host)
            return known
        self.forget(worker_id)
        worker = Worker(record, self._new_row())
        self.workers[worker_id] = worker
        self.by_row[worker.row] = worker_id
        row = self._rows[worker.row]
        row["live"] = True
        row["host"] = host_number(record.host)
        row["serves_pulls"] = bool(record.pull_address or record.transfer_grpc_address)
        row["slot"] = -1
        row["pace"] = 1.0
        row["model"] = -1
        row["drained"] = self._drains.get(record.id) == record.epoch
        row["name_hash"] = int.from_bytes(blake2b(record.id.encode(), digest_size=8).digest(), "little")
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
            self._rows[worker.row] = np.zeros((), WORKER_ROW)
            self._free.append(worker.row)

    def set_drains(self, epochs: Mapping[str, int]) -> None:
        """Workers that operators have drained, each until it starts anew: they take no new requests."""
        self._drains = epochs
        for worker_id, worker in self.workers.items():
            self._rows[worker.row]["drained"] = epochs.get(worker_id) == worker.record.epoch

    def identify(self, worker_id: WorkerId, identity: Identity, now_s: float) -> None:
        """A Watch stream has begun."""
        worker = self.workers[worker_id]
        worker.identity = identity
        worker.progress = -1
        row = self._rows[worker.row]
        key = (identity.model, identity.model_digest)
        row["model"] = self._models.setdefault(key, len(self._models))
        row["context_length"] = identity.context_length
        row["runs_whole"] = identity.role == "both"
        row["block_tokens"] = max(1, identity.block_tokens)
        row["block_bytes"] = max(1, identity.block_bytes)
        row["total_blocks"] = identity.total_blocks
        row["step_token_budget"] = max(1, identity.step_token_budget)
        row["max_running"] = max(1, identity.max_running_requests)
        row["step_tokens"] = row["step_token_budget"]
        row["prefill_tokens_per_s"] = identity.prefill_tokens_per_s or _DEFAULT_PREFILL_TOKENS_PER_S
        row["benchmark_prefill_tokens_per_s"] = row["prefill_tokens_per_s"]
        row["decode_step_s"] = identity.decode_step_s or _DEFAULT_DECODE_STEP_S
        row["benchmark_decode_step_s"] = row["decode_step_s"]
        row["promised_tpot_s"] = worker.promises.tightest_s()
        costs = assumed_costs(float(row["prefill_tokens_per_s"]), float(row["decode_step_s"]))
        _set_costs(row, costs, least_step_s=float(row["decode_step_s"]))
        row["moved_s"] = row["reported_s"] = row["told_s"] = now_s

    def report(self, worker_id: WorkerId, load: Load, now_s: float) -> None:
        """A Watch stream has brought a load; the worker must have been identified."""
        worker = self.workers[worker_id]
        row = self._rows[worker.row]
        has_work = load.running_requests + load.waiting_requests > 0
        if load.progress != worker.progress:
            row["told_s"] = now_s
        if load.progress != worker.progress or not has_work:
            row["moved_s"] = now_s
        worker.progress = load.progress
        row["up"] = True
        row["ready"] = load.ready
        row["draining"] = load.draining
        row["reported_s"] = now_s
        row["running"] = load.running_requests
        row["waiting"] = load.waiting_requests
        row["queued_tokens"] = load.queued_prefill_tokens
        row["queued_pairs"] = load.queued_prefill_pairs
        row["waiting_by_class"] = load.waiting_prefill_tokens or (0,) * NUM_CLASSES
        row["decoding"] = load.decoding_sequences
        row["context_tokens"] = load.context_tokens
        row["free_blocks"] = load.free_blocks
        row["cached_blocks"] = load.cached_blocks
        self._learn(worker, load)
        worker.shown.add((*load.admitted, *load.ended))
        for key in (*load.admitted, *load.ended):
            self._end_pending(worker, key)
        worker.promises.end(load.ended)
        if not has_work:
            worker.promises.end_all_but(worker.pending)
        row["promised_tpot_s"] = worker.promises.tightest_s()
        self._count_pending(worker, now_s)

    def broken(self, worker_id: WorkerId) -> None:
        """The Watch stream of a worker has broken: it is suspect until another brings a report."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._rows[worker.row]["up"] = False

    def grant(self, worker_id: WorkerId, attempt: AttemptId, pending: PendingAttempt) -> None:
        """Count a grant as load."""
        worker = self.workers[worker_id]
        self._end_pending(worker, str(attempt))
        worker.pending[str(attempt)] = pending
        self.recent.add(worker.row, pending.granted_s, work_s=pending.work_s, prefill_s=pending.prefill_s)
        self.links.add(pending.pulls)
        worker.promises.make(str(attempt), pending.tpot_s)
        self._rows[worker.row]["promised_tpot_s"] = worker.promises.tightest_s()
        self._count_pending(worker, pending.granted_s)

    def end(self, worker_id: WorkerId, attempt: AttemptId, now_s: float) -> None:
        """An attempt has ended, whether or not a report has shown it."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.promises.end([str(attempt)])
        self._rows[worker.row]["promised_tpot_s"] = worker.promises.tightest_s()
        if self._end_pending(worker, str(attempt)):
            self._count_pending(worker, now_s)

    def paced(self, worker_id: WorkerId, log_ratio: float, now_s: float) -> None:
        """A request on this worker took exp(log_ratio) times what was expected."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._rows[worker.row]["pace"] = worker.pace.observe(log_ratio, now_s)

    def suspect(self, now_s: float) -> npt.NDArray[np.bool_]:
        """Of each row, whether its worker gets no new work for want of life signs."""
        rows = self._rows
        heard_s = now_s - self._pauses.excused_s(now_s)
        has_work = rows["running"] + rows["waiting"] > 0
        stalled = has_work & (heard_s - rows["moved_s"] > rows["stall_limit_s"])
        result: npt.NDArray[np.bool_] = ~rows["up"] | (heard_s - rows["reported_s"] > SUSPECT_S) | stalled
        return result

    def serving(self, now_s: float) -> npt.NDArray[np.bool_]:
        """Of each row, whether its worker takes new requests."""
        rows = self._rows
        result: npt.NDArray[np.bool_] = (
            rows["live"] & rows["ready"] & ~rows["draining"] & ~rows["drained"] & ~self.suspect(now_s)
        )
        return result

    def pressure(self, candidates: IntArray, now_s: float, *, reuse: float) -> Pressure:
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

    def tick(self, now_s: float) -> None:
        """Call every `TICK_S`: stop counting grants that no report has shown for too long, notice own pauses."""
        self._pauses.tick(now_s)
        for worker in self.workers.values():
            if worker.pending:
                self._count_pending(worker, now_s)

    def _learn(self, worker: Worker, load: Load) -> None:
        row, identity = self._rows[worker.row], worker.identity
        if load.prefill_tokens_per_s > 0:
            row["prefill_tokens_per_s"] = load.prefill_tokens_per_s
        if load.decode_step_s > 0:
            row["decode_step_s"] = load.decode_step_s
        idle_step_s = (identity.decode_step_s if identity else 0.0) or _DEFAULT_DECODE_STEP_S
        row["step_tokens"] = load.step_tokens or row["step_token_budget"]
        slope_s = worker.slope.update(idle_step_s, load.decode_step_s, load.decoding_sequences)
        if load.step_costs is not None:
            _set_costs(row, load.step_costs, least_step_s=load.step_costs.fixed_s)
        else:
            idle_s = max(0.0, float(row["decode_step_s"]) - slope_s * max(0, load.decoding_sequences - 1))
            costs = assumed_costs(float(row["prefill_tokens_per_s"]), idle_s)
            _set_costs(row, replace(costs, decode_sequence_s=slope_s), least_step_s=idle_s)
        context = load.context_tokens / max(1, load.decoding_sequences)
        row["decode_slope_s"] = row["decode_sequence_s"] + row["context_token_s"] * context
        row["stall_limit_s"] = max(SUSPECT_S, _SLOW_STEPS * row["step_token_budget"] / row["prefill_tokens_per_s"])
        self.links.report(worker.row, load.holders)

    def _end_pending(self, worker: Worker, key: str) -> bool:
        """A grant counts no more; whether it did."""
        pending = worker.pending.pop(key, None)
        if pending is None:
            return False
        self.links.release(pending.pulls)
        return True

    def _count_pending(self, worker: Worker, now_s: float) -> None:
        row = self._rows[worker.row]
        if not worker.pending and not row["pending"]:
            return
        overdue = [
            key for key, attempt in worker.pending.items() if now_s - attempt.granted_s > self._pending_timeout_s
        ]
        for key in overdue:
            self._end_pending(worker, key)
        if overdue:
            # A worker that never has the request keeps no promise to it.
            worker.promises.end(overdue)
            row["promised_tpot_s"] = worker.promises.tightest_s()
        self.pending_timeouts += len(overdue)
        row["pending"] = len(worker.pending)
        row["pending_tokens"] = sum(attempt.tokens for attempt in worker.pending.values())
        row["pending_blocks"] = sum(attempt.blocks for attempt in worker.pending.values())
        row["pending_pairs"] = sum(attempt.pairs for attempt in worker.pending.values())
        by_class = [0] * NUM_CLASSES
        for attempt in worker.pending.values():
            by_class[class_index(attempt.priority)] += attempt.tokens
        row["pending_by_class"] = by_class

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros(size, WORKER_ROW)])
            self._free = list(range(size, 2 * size))[::-1]
        return self._free.pop()
