"""Instruments of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.common.fair_queue import RequestClass
from services.router.domain import Placement, Prediction, Refused

_RATIO_BOUNDARIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_CLASSES = {int(one): one.name.lower() for one in RequestClass}


class RouterMetrics:
    """What decisions did, and how right their predictions were."""

    def __init__(self) -> None:
        meter = metrics.get_meter("kvmesh.router")
        self._decisions = meter.create_counter(
            "kvmesh_router_decisions", description="Answers to asks, by policy, outcome and priority class."
        )
        self._seconds = meter.create_histogram(
            "kvmesh_router_decision_seconds", unit="s", description="Time that a decision took."
        )
        self._pulled = meter.create_counter(
            "kvmesh_router_planned_pull_blocks", description="Blocks in granted pull plans, by kind of holder."
        )
        self._handoffs = meter.create_counter(
            "kvmesh_router_handoffs_planned",
            description="Grants of a worker for the prompt and another for the output.",
        )
        self._closed = meter.create_counter(
            "kvmesh_router_attempts_closed", description="Attempts that gateways closed, by policy and outcome."
        )
        self._error = meter.create_histogram(
            "kvmesh_router_ttft_error_seconds",
            unit="s",
            description="Predicted against measured time to first token: the difference, by its side.",
        )
        self._ttft_ratio = meter.create_histogram(
            "kvmesh_router_ttft_error_ratio",
            description="Difference of predicted and measured time to first token, over the measured one.",
            explicit_bucket_boundaries_advisory=_RATIO_BOUNDARIES,
        )
        self._tpot_ratio = meter.create_histogram(
            "kvmesh_router_tpot_error_ratio",
            description="Difference of predicted and measured time of a further token, over the measured one.",
            explicit_bucket_boundaries_advisory=_RATIO_BOUNDARIES,
        )
        self._forgotten = meter.create_counter(
            "kvmesh_router_attempts_forgotten", description="Attempts dropped because a gateway never closed them."
        )

    def decided(self, answer: Placement | Refused, seconds: float, *, priority: int) -> None:
        """An ask has been answered. priority: a PriorityClass."""
        kind = _CLASSES.get(priority, "unset")
        if isinstance(answer, Refused):
            self._decisions.add(1, {"policy": "none", "outcome": answer.reason.value, "class": kind})
        else:
            self._decisions.add(1, {"policy": answer.policy, "outcome": "granted", "class": kind})
            if answer.handoff is not None:
                self._handoffs.add(1)
            for run in (*answer.pull_plan, *(answer.handoff.pull_plan if answer.handoff else ())):
                self._pulled.add(run.num_blocks, {"kind": run.kind})
        self._seconds.record(seconds)

    def closed(self, policy: str, outcome: str, prediction: Prediction, ttft_s: float, tpot_s: float) -> None:
        """A gateway has closed an attempt; ttft_s and tpot_s are 0 when there was no such time."""
        self._closed.add(1, {"policy": policy, "outcome": outcome})
        if ttft_s > 0:
            side = "late" if ttft_s > prediction.ttft_s else "early"
            self._error.record(abs(ttft_s - prediction.ttft_s), {"policy": policy, "side": side})
            self._ttft_ratio.record(abs(ttft_s - prediction.ttft_s) / ttft_s, {"policy": policy})
        if tpot_s > 0:
            self._tpot_ratio.record(abs(tpot_s - prediction.tpot_s) / tpot_s, {"policy": policy})

    def forgotten(self) -> None:
        """An attempt was dropped unclosed."""
        self._forgotten.add(1)


def observe_gauges(gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
    """Register gauges, name -> (description, read), that are read when metrics are collected."""
    meter = metrics.get_meter("kvmesh.router")
    for name, (description, read) in gauges.items():
        meter.create_observable_gauge(name, [_observer(read)], description=description)


def observe_total(name: str, description: str, read: Callable[[], int]) -> None:
    """Register a counter that somebody else keeps."""
    metrics.get_meter("kvmesh.router").create_observable_counter(name, [_observer(read)], description=description)


def _observer(read: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: [Observation(read())]
