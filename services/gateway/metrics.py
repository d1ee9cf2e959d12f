"""Metrics of the gateway. Nothing is recorded for a single token; streams are recorded when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.common.fair_queue import RequestClass
from services.gateway.move_metrics import MoveMetrics


class GatewayMetrics:
    """The instruments. moves: those of work that goes on elsewhere."""

    def __init__(self, inflight: Callable[[], int], waiting: Callable[[], int]) -> None:
        meter = self._meter = metrics.get_meter("kvmesh.gateway")
        meter.create_observable_gauge(
            "kvmesh_gateway_inflight_requests", [_observer(inflight)], description="Client requests in flight."
        )
        meter.create_observable_gauge(
            "kvmesh_gateway_waiting_requests", [_observer(waiting)], description="Those that no worker has room for."
        )
        self.moves = MoveMetrics(meter)
        self._requests = meter.create_counter(
            "kvmesh_gateway_requests", description="Client requests that ended, refused ones included, by outcome."
        )
        self._retries = meter.create_counter(
            "kvmesh_gateway_retries",
            description="Attempts given up, and asks repeated as no worker was there, by reason.",
        )
        self._refusals = meter.create_counter(
            "kvmesh_gateway_refusals",
            description="Requests refused before a worker had taken them, by reason and class.",
        )
        self._fallbacks = meter.create_counter(
            "kvmesh_gateway_fallbacks",
            description="Requests that a tenant's fallback model was tried for, by both models.",
        )
        self._versions = meter.create_counter(
            "kvmesh_gateway_version_requests", description="Requests that a worker has taken, by model and version."
        )
        self._version_fallbacks = meter.create_counter(
            "kvmesh_gateway_version_fallbacks",
            description="Requests given to another version since the chosen one had lost its workers.",
        )
        self._prepare = meter.create_histogram(
            "kvmesh_gateway_prepare_seconds", unit="s", description="Parsing, templating and tokenising."
        )
        self._queue = meter.create_histogram(
            "kvmesh_gateway_queue_seconds", unit="s", description="Waiting for placements."
        )
        self._ttft = meter.create_histogram(
            "kvmesh_ttft_seconds", unit="s", description="Arrival to the first output sent to the client."
        )
        self._tpot = meter.create_histogram(
            "kvmesh_tpot_seconds", unit="s", description="Time for each output token after the first, by request."
        )

    def observe_total(self, name: str, description: str, read: Callable[[], int]) -> None:
        """A counter that somebody else keeps."""
        self._meter.create_observable_counter(name, [_observer(read)], description=description)

    def observe_gauge(self, name: str, description: str, read: Callable[[], int]) -> None:
        """A number that somebody else keeps."""
        self._meter.create_observable_gauge(name, [_observer(read)], description=description)

    def count_retry(self, reason: str) -> None:
        """An attempt was given up and another is asked for, or the request fails."""
        self._retries.add(1, {"reason": reason})

    def count_refusal(self, reason: str, request_class: RequestClass) -> None:
        """The fair line has refused a request."""
        self._refusals.add(1, {"reason": reason, "class": request_class.name.lower()})

    def count_fallback(self, model: str, fallback: str) -> None:
        """No worker of `model` would have met the objectives."""
        self._fallbacks.add(1, {"model": model, "fallback": fallback})

    def count_version(self, model: str, version: str) -> None:
        """A worker has taken a request."""
        self._versions.add(1, {"model": model, "version": version})

    def count_version_fallback(self, model: str, version: str) -> None:
        """The version had no worker any more, and another is tried."""
        self._version_fallbacks.add(1, {"model": model, "version": version})

    def record_request(self, *, api: str, model: str, code: str, error: str) -> None:
        """The end of a client request. code: gRPC status name. error: name of the GatewayError, empty for none."""
        self._requests.add(1, {"api": api, "model": model, "code": code, "error": error})

    def record_prepare(self, seconds: float) -> None:
        """Parsing, templating and tokenising."""
        self._prepare.record(seconds)

    def record_timings(self, *, model: str, queue_s: float, ttft_s: float | None, tpot_s: float | None) -> None:
        """queue_s: waiting for placements. ttft_s and tpot_s: None when there were too few tokens."""
        attributes = {"model": model}
        self._queue.record(queue_s, attributes)
        if ttft_s is not None:
            self._ttft.record(ttft_s, attributes)
        if tpot_s is not None:
            self._tpot.record(tpot_s, attributes)


def _observer(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read())]

    return observe
