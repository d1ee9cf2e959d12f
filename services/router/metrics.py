"""Instruments of the router."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.common.fair_queue import RequestClass
from services.router.domain import Placement, Prediction, Refused
from services.router.version_metrics import VersionMetrics

_RATIO_BOUNDARIES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_CLASSES = {int(one): one.name.lower() for one in RequestClass}


class Tally:
    """A counter by labels that costs next to nothing to add to: it is read when metrics are collected."""

    def __init__(self, name: str, description: str, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}
        meter = metrics.get_meter("kvmesh.router")
        meter.create_observable_counter(name, [self._observe], description=description)

    def add(self, *values: str, count: int = 1) -> None:
        """values: of the labels, in their order."""
        self._counts[values] = self._counts.get(values, 0) + count

    def _observe(self, _: CallbackOptions) -> list[Observation]:
        # Collected in another thread, while new ones may come.
        counts = list(self._counts.items())
        return [Observation(count, dict(zip(self._labels, values, strict=True))) for values, count in counts]


class RouterMetrics:
    """What decisions did, and how right their predictions were. versions: what became of each version's attempts."""

    def __init__(self) -> None:
        self.versions = VersionMetrics()
        meter = metrics.get_meter("kvmesh.router")
        self._decisions = Tally(
            "kvmesh_router_decisions",
            "Answers to asks, by policy, outcome and priority class.",
            ("policy", "outcome", "class"),
        )
        self._seconds = meter.create_histogram(
            "kvmesh_router_decision_seconds", unit="s", description="Time that a decision took."
        )
        self._pulled = Tally(
            "kvmesh_router_planned_pull_blocks", "Blocks in granted pull plans, by kind of holder.", ("kind",)
        )
        self._handoffs = meter.create_counter(
            "kvmesh_router_handoffs_planned",
            description="Grants of a worker for the prompt and another for the output.",
        )
        self._closed = Tally(
            "kvmesh_router_attempts_closed",
            "Attempts that gateways closed, by policy and outcome.",
            ("policy", "outcome"),
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
            self._decisions.add("none", answer.reason.value, kind)
        else:
            self._decisions.add(answer.policy, "granted", kind)
            if answer.handoff is not None:
                self._handoffs.add(1)
            for run in (*answer.pull_plan, *(answer.handoff.pull_plan if answer.handoff else ())):
                self._pulled.add(run.kind, count=run.num_blocks)
        self._seconds.record(seconds)

    def closed(self, policy: str, outcome: str, prediction: Prediction, ttft_s: float, tpot_s: float) -> None:
        """A gateway has closed an attempt; ttft_s and tpot_s are 0 when there was no such time."""
        self._closed.add(policy, outcome)
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
