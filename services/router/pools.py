"""The workers of a model and role as one pool: what it is asked for, what waits for it, how many replicas it wants.

Synchronous; time comes in as an argument. Each router counts its own grants and, by their news, the other routers', so
that all want the same number; attainment is of a router's own decisions. A pool without workers is there while requests
wait for its model: so it can begin from none.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.router.domain import Ask, Placement, RefusalReason, Refused, WorkerId
from services.router.gateway_queues import GatewayQueues
from services.router.placement import Placer
from services.router.policies.view import WorkerRows
from services.router.scaling import Backlog, Demand, DesiredReplicas, ScalingConfig, backlog, needed_replicas, work_s
from services.router.worker_rows import OneRow
from services.router.workers import WorkerTable


@dataclass(frozen=True, slots=True)
class PoolKey:
    """Public name of the model, and what the workers do: "both", "prefill" or "decode"."""

    model: str
    role: str


@dataclass(frozen=True, slots=True)
class PoolSignal:
    """What an autoscaler looks at. replicas: workers that take requests.

    running: requests at workers, those that wait there and those just granted included. idle_s: since there were any,
    or any waited in gateways.
    """

    key: PoolKey
    replicas: int
    desired: int
    backlog: Backlog
    attainment: float
    running: int = 0
    idle_s: float = 0.0


class _Pool:
    def __init__(self, config: ScalingConfig) -> None:
        self.demand = Demand()
        self.desired = DesiredReplicas(config)
        # When somebody last used it; None: not looked at yet.
        self.used_s: float | None = None


class Pools:
    """All pools that have a worker or that something waits for. `update` every second; `signals`: its last results."""

    def __init__(self, config: ScalingConfig, table: WorkerTable, queues: GatewayQueues, placer: Placer) -> None:
        self._config = config
        self._table = table
        self._queues = queues
        self._placer = placer
        self._pools: dict[PoolKey, _Pool] = {}
        self.signals: tuple[PoolSignal, ...] = ()

    def answered(self, ask: Ask, answer: Placement | Refused, now_s: float) -> None:
        """An ask of this router's own gateways has been answered."""
        objective_s = ask.ttft_objective_s or self._config.ttft_s
        if isinstance(answer, Placement):
            for part in (answer, answer.handoff):
                if part is not None:
                    self.granted(part.worker_id, part.prefill_tokens, now_s)
            key = self._key_of(answer.worker_id)
            if key is not None:
                self._pool(key).demand.judge(answer.predicted_ttft_s <= objective_s, now_s)
        elif answer.reason is RefusalReason.DEADLINE:
            key = next((key for key in self._pools if key.model == ask.model), None)
            if key is not None:
                demand = self._pool(key).demand
                demand.judge(in_time=False, now_s=now_s)
                tokens = ask.prompt_tokens * self._placer.computed_share.value
                each_s = work_s(self._rows(key), tokens, self._placer.output_tokens.value)
                demand.add_work(float(each_s.mean()) if len(each_s) else 0.0, now_s)

    def granted(self, worker_id: WorkerId, prefill_tokens: int, now_s: float) -> None:
        """A worker was granted a request, by whichever router."""
        key = self._key_of(worker_id)
        if key is not None:
            row = OneRow(self._table.rows, self._table.workers[worker_id].row)
            output_tokens = 0.0 if key.role == "prefill" else self._placer.output_tokens.value
            seconds = float(work_s(row, prefill_tokens, output_tokens))
            pool = self._pool(key)
            pool.demand.add_work(seconds, now_s)
            pool.used_s = now_s

    def update(self, now_s: float) -> None:
        """Judge every pool anew; those without a worker that nothing waits for are forgotten."""
        keys = {key for worker_id in self._table.workers if (key := self._key_of(worker_id)) is not None}
        served = {key.model for key in keys}
        keys |= {PoolKey(model, "both") for model in self._queues.models(now_s) - served}
        for key in set(self._pools) - keys:
            del self._pools[key]
        for key in keys:
            self._pool(key)
        self.signals = tuple(self._signal(key, now_s) for key in sorted(keys, key=lambda key: (key.model, key.role)))

    def _signal(self, key: PoolKey, now_s: float) -> PoolSignal:
        pool, serving = self._pool(key), self._table.serving(now_s)
        rows, numbers = self._rows(key), self._row_numbers(key)
        waiting = self._queues.total(key.model, now_s)
        work = backlog(
            rows,
            waiting_requests=waiting.requests,
            waiting_tokens=waiting.prompt_tokens * self._placer.computed_share.value,
            output_tokens=self._placer.output_tokens.value,
        )
        needed = needed_replicas(pool.demand.work.rate(now_s), work.seconds, self._config)
        replicas = int(serving[numbers].sum())
        desired = pool.desired.update(needed, replicas, now_s)
        running = int(sum(rows[name].sum() for name in ("running", "waiting", "pending")))
        if pool.used_s is None or running or waiting.requests:
            pool.used_s = now_s
        idle_s = now_s - pool.used_s
        if self._config.idle_s and idle_s >= self._config.idle_s:
            desired = 0
        return PoolSignal(key, replicas, desired, work, pool.demand.attainment(now_s), running, idle_s)

    def _pool(self, key: PoolKey) -> _Pool:
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self._config)
        return pool

    def _key_of(self, worker_id: WorkerId) -> PoolKey | None:
        worker = self._table.workers.get(worker_id)
        if worker is None or worker.identity is None:
            return None
        return PoolKey(worker.identity.model, worker.identity.role)

    def _row_numbers(self, key: PoolKey) -> list[int]:
        return [worker.row for worker_id, worker in self._table.workers.items() if self._key_of(worker_id) == key]

    def _rows(self, key: PoolKey) -> WorkerRows:
        return self._table.rows.take(self._row_numbers(key))
