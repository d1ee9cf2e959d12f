"""The pause that a client sees while its output goes on elsewhere: from the last token before to the first after."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span

from services.gateway.metrics import GatewayMetrics
from services.gateway.move_times import MoveTimes

_tracer = trace.get_tracer("kvmesh.gateway")
_log = structlog.get_logger("gateway.rescue")


@dataclass(slots=True)
class Interruption:
    """is_move: the next attempt was prepared before the last one was left. last_token_at_s: monotonic.

    known_tokens: what the next attempt begins with. times: of the move's phases, None where no move was on its way.
    """

    is_move: bool
    last_token_at_s: float
    known_tokens: int
    span: Span
    times: MoveTimes | None = None

    @classmethod
    def begin(
        cls,
        reason: str,
        worker_id: str,
        last_token_at_s: float,
        known_tokens: int,
        *,
        is_move: bool,
        times: MoveTimes | None,
    ) -> Interruption:
        """The attempt at `worker_id` was left after its first token."""
        span = _tracer.start_span("move" if is_move else "rescue", attributes={"kvmesh.reason": reason})
        span.set_attributes({"kvmesh.left_worker_id": worker_id, "kvmesh.known_tokens": known_tokens})
        return cls(is_move, last_token_at_s, known_tokens, span, times)

    def over(self, metrics: GatewayMetrics, *, worker_id: str, attempt: int, now_s: float) -> None:
        """The first token of another worker has come."""
        pause_s = now_s - self.last_token_at_s
        record = metrics.moves.record_move_gap if self.is_move else metrics.moves.record_rescue_pause
        record(pause_s)
        phases = self._phases(now_s)
        self.span.set_attributes({"kvmesh.worker_id": worker_id, "kvmesh.attempt": attempt})
        self.span.set_attributes({f"kvmesh.{name}": value for name, value in phases.items()})
        self.span.end()
        _log.info(
            "moved" if self.is_move else "rescued",
            worker_id=worker_id,
            attempt=attempt,
            known_tokens=self.known_tokens,
            pause_s=round(pause_s, 4),
            **phases,
        )

    def abandon(self) -> None:
        """The request has ended first."""
        self.span.end()

    def _phases(self, now_s: float) -> dict[str, float]:
        """Of the move, and the two parts of the pause: without a source that is heard, and without the target's."""
        if self.times is None:
            return {}
        switched_s = self.times.switched_at_s
        parts = {"left_s": switched_s - self.last_token_at_s, "first_token_s": now_s - switched_s}
        return self.times.seconds() | {name: round(value, 4) for name, value in parts.items()}


@dataclass(slots=True, eq=False)
class Pauses:
    """Those of one stream, one at a time. last_token_at_s: monotonic."""

    metrics: GatewayMetrics
    last_token_at_s: float = 0.0
    _open: Interruption | None = None

    def begin(
        self, reason: str, worker_id: str, known_tokens: int, *, is_move: bool, times: MoveTimes | None = None
    ) -> None:
        """The attempt at `worker_id` was left; before the first token nobody sees a pause. times: see Interruption.

        One that is rescued before a move of it has shown its first token counts as a rescue.
        """
        if not known_tokens:
            return
        if not is_move:
            self.metrics.moves.count_rescue(reason)
        if self._open is None:
            self._open = Interruption.begin(
                reason, worker_id, self.last_token_at_s, known_tokens, is_move=is_move, times=times
            )
        self._open.is_move &= is_move

    def over(self, worker_id: str, attempt: int, now_s: float) -> None:
        """An attempt's first token has come. now_s: monotonic time."""
        interruption, self._open = self._open, None
        if interruption is not None:
            interruption.over(self.metrics, worker_id=worker_id, attempt=attempt, now_s=now_s)

    def abandon(self) -> None:
        """The request has ended. Idempotent."""
        interruption, self._open = self._open, None
        if interruption is not None:
            interruption.abandon()
