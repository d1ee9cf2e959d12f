"""Judges the pools once a second and shows them as metrics, for autoscalers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.router.pools import Pools, PoolSignal

_EVERY_S = 1.0
GAUGES: dict[str, tuple[str, Callable[[PoolSignal], float]]] = {
    "kvmesh_router_pool_replicas": ("Workers that take requests.", lambda pool: pool.replicas),
    "kvmesh_router_pool_desired_replicas": ("Workers that the load asks for.", lambda pool: pool.desired),
    "kvmesh_router_pool_queue_tokens": (
        "Prompt tokens to be computed, at workers and in gateways.",
        lambda pool: pool.backlog.queue_tokens,
    ),
    "kvmesh_router_pool_waiting_requests": (
        "Requests that wait in gateways.",
        lambda pool: pool.backlog.waiting_requests,
    ),
    "kvmesh_router_pool_backlog_seconds": (
        "Time that one worker would take for all that waits.",
        lambda pool: pool.backlog.seconds,
    ),
    "kvmesh_router_pool_ttft_attainment": (
        "Share of this router's requests that are predicted to get their first token in time.",
        lambda pool: pool.attainment,
    ),
}


class PoolMetrics:
    """Gauges by model and role."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        meter = metrics.get_meter("kvmesh.router")
        for name, (description, value) in GAUGES.items():
            meter.create_observable_gauge(name, [self._observer(value)], description=description)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._pools.update(time.monotonic())
            await asyncio.sleep(_EVERY_S)

    def _observer(self, value: Callable[[PoolSignal], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            return [
                Observation(value(signal), {"model": signal.key.model, "role": signal.key.role})
                for signal in self._pools.signals
            ]

        return observe
