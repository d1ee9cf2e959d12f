"""How far a copy or a load is: log lines for people, gauges for `kvmesh up`, `kvmesh ps` and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

_LOG_EVERY_S = 2.0
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.worker")


class LoadLog:
    """One worker's; `told` may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.done_bytes = 0
        self.total_bytes = 0
        self._clock = clock
        self._model = self._phase = ""
        self._next_s = 0.0
        _meter.create_observable_gauge(
            "kvmesh_worker_load_done_bytes",
            callbacks=[self._gauge(lambda: self.done_bytes)],
            description="Bytes of a model copied or read so far; absent while none is.",
        )
        _meter.create_observable_gauge(
            "kvmesh_worker_load_total_bytes",
            callbacks=[self._gauge(lambda: self.total_bytes)],
            description="All bytes of the model that is being copied or read.",
        )

    def begin(self, model: str, phase: str) -> None:
        """A copy or a load begins."""
        self.done_bytes = self.total_bytes = 0
        self._model, self._phase = model, phase
        self._next_s = self._clock() + _LOG_EVERY_S

    def told(self, done_bytes: int, total_bytes: int) -> None:
        """So far it is."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + _LOG_EVERY_S
            percent = round(100 * done_bytes / total_bytes) if total_bytes else 0
            _log.info(self._phase, model=self._model, percent=percent, done_bytes=done_bytes, total_bytes=total_bytes)

    def clear(self) -> None:
        """Nothing is under way."""
        self._phase = ""
        self.done_bytes = self.total_bytes = 0

    def _gauge(self, read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(read(), {"phase": self._phase})] if self._phase else []
