"""Metrics of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation


class BatchMetrics:
    """The instruments."""

    def __init__(self, open_batches: Callable[[], int], running: Callable[[], int], lines: Callable[[], int]) -> None:
        meter = metrics.get_meter("kvmesh.gateway")
        for name, description, read in (
            (
                "kvmesh_gateway_open_batches",
                "Batches of the mesh that are not over.",
                open_batches,
            ),
            ("kvmesh_gateway_running_batches", "Batches that this gateway runs.", running),
            ("kvmesh_gateway_batch_running_lines", "Their lines in flight.", lines),
        ):
            meter.create_observable_gauge(name, [_observer(read)], description=description)
        self._ended = meter.create_counter("kvmesh_gateway_batches", description="Batches ended here, by status.")
        self._lines = meter.create_counter(
            "kvmesh_gateway_batch_lines",
            description="Lines of batches by what came of a run: answered, wrong, refused for now or failed.",
        )
        self._takeovers = meter.create_counter(
            "kvmesh_gateway_batch_takeovers", description="Batches begun here that had been begun before."
        )
        self._losses = meter.create_counter(
            "kvmesh_gateway_batch_losses", description="Runs of batches that ended before their batch, by reason."
        )

    def ended(self, status: str) -> None:
        """A batch is over."""
        self._ended.add(1, {"status": status})

    def line(self, outcome: str) -> None:
        """A line was run."""
        self._lines.add(1, {"outcome": outcome})

    def taken_over(self) -> None:
        """A batch goes on here."""
        self._takeovers.add(1)

    def lost(self, reason: str) -> None:
        """A run ends, and its batch does not."""
        self._losses.add(1, {"reason": reason})


def _observer(read: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read())]

    return observe
