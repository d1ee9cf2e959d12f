"""One prompt on its way through the mesh: ask, grant, an attempt at a worker, and again elsewhere if nothing is lost.

`read` gives the worker's messages from Admitted to Completed. Every ask is a turn in the fair line; while every worker
is full or answers STALE the prompt waits there. A worker that fails before the first token is excluded and another is
asked for, unseen by the client, as long as the tenant's budget of retries lasts. While a worker says nothing at all the
router is asked again, which by then knows whether it is suspect; patience doubles. A failure after the first token
raises WorkerFailed: the place where a broken stream would be resumed.
Every granted attempt is closed by one Done. `close` is idempotent and releases everything.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc
import structlog
from kvmesh.v1.common_pb2 import CachedTokens
from kvmesh.v1.router_pb2 import (
    OUTCOME_CANCELLED,
    OUTCOME_OK,
    OUTCOME_STALE,
    OUTCOME_WORKER_FAILED,
    Ask,
    Done,
    Grant,
    Outcome,
)
from kvmesh.v1.worker_pb2 import WorkerGenerateResponse
from opentelemetry import trace

from services.common.rpc import caller_metadata
from services.gateway.errors import DeadlineExceeded, GatewayError, InvalidRequest, WorkerFailed, WorkersFull
from services.gateway.fair_line import FairLine
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement_job import PlacementJob
from services.gateway.pulse import Pulse
from services.gateway.retry_budget import RetryBudget
from services.gateway.router_client import RouterClient
from services.gateway.tickets import Ticket
from services.gateway.worker_channels import WorkerChannels
from services.gateway.worker_link import Attempt, AttemptEnded

_tracer = trace.get_tracer("kvmesh.gateway")
_log = structlog.get_logger("gateway.placement")


@dataclass(frozen=True, slots=True)
class Placement:
    """What all placed streams share."""

    router: RouterClient
    line: FairLine
    retries: RetryBudget
    channels: WorkerChannels
    pulse: Pulse
    metrics: GatewayMetrics
    admit_patience_s: float
    admit_timeout_s: float
    stall_timeout_s: float
    max_attempts: int


@dataclass(slots=True, eq=False)
class PlacedStream:
    """State of one prompt: at most one attempt is open at a time."""

    placement: Placement
    job: PlacementJob
    worker_id: str = ""
    output_tokens: int = 0
    route_s: float = 0.0
    asked_at_s: float = 0.0
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    _attempt: int = 0
    _failures: int = 0
    _silences: int = 0
    _waiting_since_s: float = 0.0
    _excluded: list[str] = field(default_factory=list)
    _address: str = ""
    _open: Attempt | None = None
    _admitted: bool = False
    _accepted: bool = False  # some worker has admitted it
    _cached_tokens: int = 0
    _stalled: bool = False
    _heard_at_s: float = 0.0
    _closed: bool = False
    _ticket: Ticket | None = None

    async def read(self) -> WorkerGenerateResponse:
        """The next Admitted, tokens, finish or Completed. Raises GatewayError; nothing is to be read after either."""
        while True:
            if self._open is None:
                await self._place()
                continue
            try:
                message = await self._open.read()
            except AttemptEnded as end:
                if self._stalled:
                    self._on_silence()
                else:
                    self._on_status(end.code, end.detail)
                continue
            self._heard_at_s = time.monotonic()
            kind = message.WhichOneof("event")
            if kind == "tokens":
                if not self.first_token_at_s:
                    self.first_token_at_s = self._heard_at_s
                self.last_token_at_s = self._heard_at_s
                self.output_tokens += len(message.tokens.token_ids)
            elif kind == "stale":
                self._on_stale()
                continue
            elif kind == "admitted":
                self._admitted = self._accepted = True
                self._cached_tokens = message.admitted.cached_tokens
            elif kind == "completed":
                cached = message.completed.usage.cached
                self._cached_tokens = cached.local + cached.peer + cached.ram + cached.ssd
                self._end_attempt(OUTCOME_OK, cached)
                self._leave_line()
                self._closed = True
            return message

    def finish(self) -> None:
        """The client has all it wants (stop strings); the worker's rest is not needed."""
        self._close(OUTCOME_OK)

    def close(self) -> None:
        """Release everything now: cancels the worker's call and tells the router."""
        self._close(OUTCOME_CANCELLED)

    def pulse(self, now_s: float) -> None:
        """Break off an attempt whose deadline has passed or whose worker has been silent for too long."""
        if self._open is None:
            return
        if now_s >= self.job.deadline_at_s:
            self._open.break_off(AttemptEnded(grpc.StatusCode.DEADLINE_EXCEEDED, ""))
        patience_s = self.placement.admit_patience_s * 2**self._silences
        limit_s = self.placement.stall_timeout_s if self._admitted else patience_s
        if now_s - self._heard_at_s > limit_s and self._open.break_off(AttemptEnded(grpc.StatusCode.CANCELLED, "")):
            self._stalled = True

    async def _place(self) -> None:
        """Take a turn and ask; without a call afterwards when every worker was full."""
        started_s = time.monotonic()
        line = self.placement.line
        if self._ticket is None:
            self._ticket = line.join(self.job.wanted())
        ticket = self._ticket
        await line.turn(ticket)
        self._attempt += 1
        self.asked_at_s = time.monotonic()
        if self.asked_at_s >= self.job.deadline_at_s:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        try:
            grant = await self._granted(ticket)
        except WorkersFull as full:
            if self._closed:
                # Its ticket has been given back.
                raise asyncio.CancelledError from None
            line.full(ticket, full.retry_after_s, full.room_in_s)
            return
        finally:
            self.route_s += time.monotonic() - started_s
        line.granted(ticket, grant.predicted_ttft_s)
        self._heard_at_s = time.monotonic()
        self._waiting_since_s = self._waiting_since_s or self._heard_at_s
        self.worker_id, self._address = grant.worker_id, grant.worker_address
        link = self.placement.channels.acquire(self._address)
        self._admitted = self._stalled = False
        self._open = link.start(
            self.job.worker_request(self._attempt, grant),
            deadline_s=max(0.001, self.job.deadline_at_s - self._heard_at_s),
            metadata=caller_metadata(self.job.request_id),
        )
        self.placement.pulse.add(self)

    async def _granted(self, ticket: Ticket) -> Grant:
        with _tracer.start_as_current_span("route") as span:
            grant = await self.placement.router.ask(self._ask(ticket), self.job.deadline_at_s)
            span.set_attributes({"kvmesh.worker_id": grant.worker_id, "kvmesh.attempt": self._attempt})
        if self._closed:
            self._tell_router(OUTCOME_CANCELLED)
            raise asyncio.CancelledError
        return grant

    def _rejoin_line(self) -> None:
        if self._ticket is not None:
            self.placement.line.again(self._ticket, is_accepted=self._accepted)

    def _leave_line(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.placement.line.leave(
                ticket,
                cached_tokens=self._cached_tokens,
                output_tokens=self.output_tokens if self._accepted else None,
            )

    def _ask(self, ticket: Ticket) -> Ask:
        objectives = None if self._accepted else self.job.objectives_left(self.asked_at_s)
        return self.job.ask(self._attempt, self._excluded, ticket.asks_as, objectives)

    def _on_status(self, code: grpc.StatusCode, details: str) -> None:
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._raise(DeadlineExceeded("the deadline passed before the answer was complete"))
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            self._raise(InvalidRequest(details))
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED and not self.first_token_at_s:
            self._on_stale()
        elif code == grpc.StatusCode.OK:
            self._fail("the worker ended the stream early")
        else:
            self._fail(f"the worker failed: {code.name}")

    def _on_stale(self) -> None:
        self.placement.metrics.count_retry("stale")
        self._end_attempt(OUTCOME_STALE)
        self._rejoin_line()

    def _on_silence(self) -> None:
        """A worker that has not admitted the request may only be slow: it is not excluded before the last patience."""
        waited_s = time.monotonic() - self._waiting_since_s
        if self._admitted or waited_s > self.placement.admit_timeout_s:
            self._fail("the worker is silent")
            return
        self._silences += 1
        self.placement.metrics.count_retry("silent")
        _log.warning("worker_silent", worker_id=self.worker_id, attempt=self._attempt, waited_s=round(waited_s, 3))
        self._end_attempt(OUTCOME_CANCELLED)
        self._retry()

    def _fail(self, reason: str) -> None:
        """Leave a broken attempt; returns when another may be tried, raises when not."""
        self._failures += 1
        self.placement.metrics.count_retry("worker_failed")
        _log.warning("worker_failed", worker_id=self.worker_id, attempt=self._attempt, reason=reason,
                     output_tokens=self.output_tokens)  # fmt: skip
        if self.first_token_at_s:
            self._raise(WorkerFailed("the worker was lost while it answered"))
        if self._failures >= self.placement.max_attempts:
            self._raise(WorkerFailed(f"{self._failures} workers failed to answer"))
        self._end_attempt(OUTCOME_WORKER_FAILED)
        self._retry()
        self._excluded.append(self.worker_id)
        self._silences, self._waiting_since_s = 0, 0.0

    def _retry(self) -> None:
        if not self.placement.retries.take(self.job.tenant, time.monotonic()):
            self.placement.metrics.count_retry("over_budget")
            raise WorkerFailed("the worker failed, and too many requests of this tenant are retried already")
        self._rejoin_line()

    def _raise(self, error: GatewayError) -> None:
        self._end_attempt(OUTCOME_WORKER_FAILED if isinstance(error, WorkerFailed) else OUTCOME_CANCELLED)
        raise error

    def _close(self, outcome: Outcome.ValueType) -> None:
        if not self._closed:
            self._closed = True
            self._end_attempt(outcome)
        self._leave_line()

    def _end_attempt(self, outcome: Outcome.ValueType, cached: CachedTokens | None = None) -> None:
        attempt, self._open = self._open, None
        if attempt is None:
            return
        attempt.cancel()
        if self._admitted:
            self.placement.line.wake(self.job.model)
        self.placement.pulse.discard(self)
        self.placement.channels.release(self._address, asyncio.get_running_loop().time())
        self._tell_router(outcome, cached)

    def _tell_router(self, outcome: Outcome.ValueType, cached: CachedTokens | None = None) -> None:
        self.placement.router.done(
            Done(
                request_id=self.job.request_id,
                attempt=self._attempt,
                outcome=outcome,
                ttft_s=max(0.0, self.first_token_at_s - self.asked_at_s),
                output_tokens=self.output_tokens,
                cached=cached,
                tpot_s=self._tpot_s(),
            )
        )

    def _tpot_s(self) -> float:
        further_tokens = self.output_tokens / self.job.num_choices - 1
        return (self.last_token_at_s - self.first_token_at_s) / further_tokens if further_tokens > 0 else 0.0
