"""Where requests wait for a model that is loaded when it is asked for and has no worker at the moment.

Whoever waits is told of to the routers, whose pools tell autoscalers and the local supervisor; nobody is started from
here. The queue is bounded, and a request whose time would be over before the model serves is refused at once, with the
forecast as the time to come back. A refused one counts as wanting the model until then, so that it finds it loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from opentelemetry import metrics

from services.gateway.errors import ModelLoading
from services.gateway.load_times import LEAST_S, LoadTimes

# A model that has only now lost its worker is looked at again after this; the routers' report may be older.
_SETTLE_S = 0.2
_log = structlog.get_logger("gateway.cold_starts")
_meter = metrics.get_meter("kvmesh.gateway")
_waits = _meter.create_counter(
    "kvmesh_gateway_cold_starts", description="Requests for a model that was not loaded, by model and outcome."
)
_seconds = _meter.create_histogram(
    "kvmesh_gateway_cold_start_seconds", unit="s", description="First request that waits to the model serving."
)


@dataclass(frozen=True, slots=True)
class ColdLimits:
    """max_waiting: requests that wait, of all models. max_wait_s: longest wait of one."""

    max_waiting: int
    max_wait_s: float


@dataclass(slots=True, eq=False)
class _Cold:
    """A model that is wanted and has no worker. Monotonic seconds. wanted_until_s: by requests that were refused."""

    since_s: float
    num_waiting: int = 0
    wanted_until_s: float = 0.0
    served: asyncio.Event = field(default_factory=asyncio.Event)


class ColdStarts:
    """Owner of those that wait. `look` at every report of a router; `waiting` is what routers are told."""

    def __init__(
        self,
        times: LoadTimes,
        limits: ColdLimits,
        *,
        serves: Callable[[str], bool],
        wanted: asyncio.Event,
    ) -> None:
        """times: of the models loaded on demand. serves: whether one has a worker. wanted: set when somebody waits."""
        self._times = times
        self._limits = limits
        self._serves = serves
        self._wanted = wanted
        self._cold: dict[str, _Cold] = {}

    @property
    def models(self) -> Mapping[str, int]:
        """The models that are loaded on demand, with the bytes of their artifacts."""
        return self._times.num_bytes

    @property
    def num_waiting(self) -> int:
        """Requests that wait; 0 when idle."""
        return sum(cold.num_waiting for cold in self._cold.values())

    def is_wanted(self, model: str) -> bool:
        """Whether anything waits for it."""
        return model in self._cold

    def forecast_s(self, model: str) -> float:
        """Until a request that comes now would be served; 0 for one that serves."""
        if self._serves(model):
            return 0.0
        cold = self._cold.get(model)
        return self._times.left_s(model, time.monotonic() - cold.since_s if cold is not None else 0.0)

    async def wait(self, model: str, deadline_at_s: float, *, has_gone: bool = False) -> float:
        """Until the model serves; seconds that were forecast. has_gone: a router knows better than its last report.

        Raises ModelLoading when too many wait or it would take too long.
        """
        if has_gone:
            await asyncio.sleep(_SETTLE_S)
        if self._serves(model):
            return 0.0
        cold, now_s = self._cold_of(model), time.monotonic()
        forecast_s = self._times.left_s(model, now_s - cold.since_s)
        ends_s = min(deadline_at_s, now_s + self._limits.max_wait_s)
        if self.num_waiting >= self._limits.max_waiting:
            raise self._refusal(cold, model, forecast_s, "queue_full", f"{self.num_waiting} requests wait for models")
        if now_s + forecast_s > ends_s:
            raise self._refusal(cold, model, forecast_s, "too_late", "that is too late for this request")
        cold.num_waiting += 1
        self._wanted.set()
        try:
            async with asyncio.timeout(ends_s - now_s):
                await cold.served.wait()
        except TimeoutError:
            left_s = self._times.left_s(model, time.monotonic() - cold.since_s)
            raise self._refusal(cold, model, left_s, "not_in_time", "it was forecast to be there by now") from None
        finally:
            cold.num_waiting -= 1
        _waits.add(1, {"model": model, "outcome": "served"})
        return forecast_s

    def look(self) -> None:
        """Routers have told of their workers: let those go on whose model serves."""
        for model in [model for model in self._cold if self._serves(model)]:
            cold = self._cold.pop(model)
            took_s = time.monotonic() - cold.since_s
            if took_s >= LEAST_S:
                # Less is a worker that was only silent for a moment.
                self._times.learn(model, took_s)
            _seconds.record(took_s, {"model": model})
            _log.info("model_loaded", model=model, took_s=round(took_s, 3), waiting=cold.num_waiting)
            cold.served.set()

    def waiting(self) -> dict[str, int]:
        """Requests that want each model, refused ones that may come back as one. Models that nobody wants are left."""
        now_s = time.monotonic()
        for model, cold in list(self._cold.items()):
            if not cold.num_waiting and cold.wanted_until_s < now_s:
                del self._cold[model]
        return {model: max(1, cold.num_waiting) for model, cold in self._cold.items()}

    def _cold_of(self, model: str) -> _Cold:
        cold = self._cold.get(model)
        if cold is None:
            cold = self._cold[model] = _Cold(time.monotonic())
            _log.info("model_wanted", model=model, forecast_s=round(self._times.whole_s(model), 3))
        return cold

    def _refusal(self, cold: _Cold, model: str, forecast_s: float, outcome: str, why: str) -> ModelLoading:
        _waits.add(1, {"model": model, "outcome": outcome})
        cold.wanted_until_s = max(cold.wanted_until_s, time.monotonic() + 2 * forecast_s)
        self._wanted.set()
        detail = f"the model {model!r} is not loaded: it would serve in about {forecast_s:.0f} s; {why}"
        return ModelLoading(detail, "model", forecast_s)
