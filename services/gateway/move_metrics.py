"""Metrics of work that goes on at another worker: rescues, moves and handoffs."""

from __future__ import annotations

from opentelemetry.metrics import Meter


class MoveMetrics:
    """The instruments. Seconds are as the client sees them."""

    def __init__(self, meter: Meter) -> None:
        self._rescues = meter.create_counter(
            "kvmesh_gateway_rescues",
            description="Attempts lost after their first token that go on elsewhere, by reason.",
        )
        self._rescue_pause = meter.create_histogram(
            "kvmesh_gateway_rescue_pause_seconds",
            unit="s",
            description="From the last token of a lost attempt to the first of the next.",
        )
        self._moves = meter.create_counter(
            "kvmesh_gateway_moves", description="Moves of running attempts to other workers, by outcome."
        )
        self._move_gap = meter.create_histogram(
            "kvmesh_gateway_move_gap_seconds",
            unit="s",
            description="From the last token before a move to the first after.",
        )
        self._handoffs = meter.create_counter(
            "kvmesh_gateway_handoffs",
            description="Prompts computed by one worker for another, by outcome and whether there was output by then.",
        )
        self._handoff_seconds = meter.create_histogram(
            "kvmesh_gateway_handoff_seconds", unit="s", description="From the start of both parts to the switch."
        )

    def count_rescue(self, reason: str) -> None:
        """An attempt was lost after its first token, and goes on elsewhere."""
        self._rescues.add(1, {"reason": reason})

    def count_move(self, outcome: str) -> None:
        """A worker would rather not go on with an attempt, and the gateway has tried to move it."""
        self._moves.add(1, {"outcome": outcome})

    def record_move_gap(self, seconds: float) -> None:
        """The gap of a move."""
        self._move_gap.record(seconds)

    def count_handoff(self, outcome: str, phase: str) -> None:
        """A handoff has started, or has ended one way or another; phase: "prefill" before any output, else "decode"."""
        self._handoffs.add(1, {"outcome": outcome, "phase": phase})

    def record_handoff(self, seconds: float) -> None:
        """A handoff is complete."""
        self._handoff_seconds.record(seconds)

    def record_rescue_pause(self, seconds: float) -> None:
        """The pause of a rescue."""
        self._rescue_pause.record(seconds)
