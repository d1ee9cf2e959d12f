"""One prompt on its way through the mesh: ask, grant, Worker.Generate, and again elsewhere while nothing is lost by it.

`read` gives the worker's messages from Admitted to Completed. While every worker is full or answers STALE the prompt
waits in line. A worker that fails before the first token is excluded and another is asked for, unseen by the client.
While a worker says nothing at all the router is asked again, which by then knows whether it is suspect; patience
doubles. A failure after the first token raises WorkerFailed: the place where a broken stream would be resumed.
Every granted attempt is closed by one Done. `close` is idempotent and releases everything.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog
from kvmesh.v1.common_pb2 import CachedTokens, SamplingParams
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
from kvmesh.v1.worker_pb2 import WorkerGenerateRequest, WorkerGenerateResponse
from opentelemetry import trace

from services.common.rpc import call_metadata
from services.common.security import MeshSecret
from services.gateway.errors import DeadlineExceeded, GatewayError, InvalidRequest, WorkerFailed, WorkersFull
from services.gateway.metrics import GatewayMetrics
from services.gateway.pulse import Pulse
from services.gateway.request import PromptPlan
from services.gateway.router_client import RouterClient
from services.gateway.waiting_line import Ticket, WaitingLine
from services.gateway.worker_channels import WorkerChannels

_tracer = trace.get_tracer("kvmesh.gateway")
_log = structlog.get_logger("gateway.placement")


@dataclass(frozen=True, slots=True)
class Placement:
    """What all placed streams share."""

    router: RouterClient
    line: WaitingLine
    channels: WorkerChannels
    secret: MeshSecret
    pulse: Pulse
    metrics: GatewayMetrics
    admit_patience_s: float
    admit_timeout_s: float
    stall_timeout_s: float
    max_attempts: int


@dataclass(slots=True)
class PlacementJob:
    """One prompt ready to be placed. deadline_at_s: monotonic."""

    request_id: str
    tenant: str
    model: str
    model_digest: bytes
    prompt: PromptPlan
    block_root: bytes
    owner_digest: bytes
    sampling: SamplingParams
    num_choices: int
    stop_token_ids: tuple[int, ...]
    priority: int
    deadline_at_s: float
    traceparent: str


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
    _attempt: int = 0
    _failures: int = 0
    _silences: int = 0
    _waiting_since_s: float = 0.0
    _excluded: list[str] = field(default_factory=list)
    _address: str = ""
    _call: Any = None  # grpc.aio.UnaryStreamCall; grpc-stubs type a stub's calls as the synchronous ones
    _admitted: bool = False
    _stalled: bool = False
    _heard_at_s: float = 0.0
    _closed: bool = False
    _ticket: Ticket | None = None

    async def read(self) -> WorkerGenerateResponse:
        """The next Admitted, tokens, finish or Completed. Raises GatewayError; nothing is to be read after either."""
        while True:
            if self._call is None:
                await self._place()
                continue
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                self._on_status(error.code(), error.details() or "")
                continue
            except asyncio.CancelledError:
                if self._stalled and not self._closed:
                    self._on_silence()
                    continue
                raise
            if not isinstance(message, WorkerGenerateResponse):
                self._fail("the worker ended the stream early")
                continue
            self._heard_at_s = time.monotonic()
            kind = message.WhichOneof("event")
            if kind == "tokens":
                if not self.first_token_at_s:
                    self.first_token_at_s = self._heard_at_s
                self.output_tokens += len(message.tokens.token_ids)
            elif kind == "stale":
                self._on_stale()
                continue
            elif kind == "admitted":
                self._admitted = True
                self._leave_line()
            elif kind == "completed":
                self._end_attempt(OUTCOME_OK, message.completed.usage.cached)
                self._closed = True
            return message

    def finish(self) -> None:
        """The client has all it wants (stop strings); the worker's rest is not needed."""
        self._close(OUTCOME_OK)

    def close(self) -> None:
        """Release everything now: cancels the worker's call and tells the router."""
        self._close(OUTCOME_CANCELLED)

    def pulse(self, now_s: float) -> None:
        """Break off an attempt whose worker has been silent for too long."""
        patience_s = self.placement.admit_patience_s * 2**self._silences
        limit_s = self.placement.stall_timeout_s if self._admitted else patience_s
        if self._call is not None and not self._stalled and now_s - self._heard_at_s > limit_s:
            self._stalled = True
            self._call.cancel()

    async def _place(self) -> None:
        """Take a turn and ask; without a call afterwards when every worker was full."""
        started_s = time.monotonic()
        line = self.placement.line
        if self._ticket is None and line.has(self.job.model):
            self._join_line()
        if self._ticket is not None:
            await line.turn(self._ticket, self.job.deadline_at_s)
        self._attempt += 1
        self.asked_at_s = time.monotonic()
        if self.asked_at_s >= self.job.deadline_at_s:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        try:
            grant = await self._granted()
        except WorkersFull as full:
            ticket = self._join_line()
            ticket.retry_after_s = full.retry_after_s or ticket.retry_after_s
            return
        finally:
            self.route_s += time.monotonic() - started_s
        self._heard_at_s = time.monotonic()
        self._waiting_since_s = self._waiting_since_s or self._heard_at_s
        self.worker_id, self._address = grant.worker_id, grant.worker_address
        stub = self.placement.channels.acquire(self._address)
        self._admitted = self._stalled = False
        self._call = stub.Generate(
            self._worker_request(grant),
            timeout=max(0.001, self.job.deadline_at_s - self._heard_at_s),
            metadata=call_metadata(self.placement.secret, self.job.request_id),
        )
        self.placement.pulse.add(self)

    async def _granted(self) -> Grant:
        with _tracer.start_as_current_span("route") as span:
            grant = await self.placement.router.ask(self._ask(), self.job.deadline_at_s)
            span.set_attributes({"kvmesh.worker_id": grant.worker_id, "kvmesh.attempt": self._attempt})
        if self._closed:
            self._tell_router(OUTCOME_CANCELLED)
            raise asyncio.CancelledError
        return grant

    def _join_line(self) -> Ticket:
        if self._ticket is None:
            self._ticket = self.placement.line.join(self.job.model, self.job.priority)
        return self._ticket

    def _leave_line(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.placement.line.leave(ticket)

    def _ask(self) -> Ask:
        job = self.job
        return Ask(
            request_id=job.request_id,
            attempt=self._attempt,
            model=job.model,
            block_ids=job.prompt.block_ids,
            model_digest=job.model_digest,
            prompt_tokens=job.prompt.num_tokens,
            max_output_tokens=job.prompt.max_tokens * job.num_choices,
            num_choices=job.num_choices,
            priority=job.priority,  # type: ignore[arg-type]
            tenant=job.tenant,
            excluded_workers=self._excluded,
            traceparent=job.traceparent,
        )

    def _worker_request(self, grant: Grant) -> WorkerGenerateRequest:
        job = self.job
        request = WorkerGenerateRequest.FromString(job.prompt.message)
        rest = WorkerGenerateRequest(
            request_id=job.request_id,
            attempt=self._attempt,
            model_digest=job.model_digest,
            block_root=job.block_root,
            owner_digest=job.owner_digest,
            sampling=job.sampling,
            num_choices=job.num_choices,
            max_tokens=job.prompt.max_tokens,
            stop_token_ids=job.stop_token_ids,
            pull_plan=grant.pull_plan,
            priority=job.priority,  # type: ignore[arg-type]
            expected_local_blocks=grant.local_blocks,
        )
        request.MergeFrom(rest)
        return request

    def _on_status(self, code: grpc.StatusCode, details: str) -> None:
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._raise(DeadlineExceeded("the deadline passed before the answer was complete"))
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            self._raise(InvalidRequest(details))
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED and not self.first_token_at_s:
            self._on_stale()
        else:
            self._fail(f"the worker failed: {code.name}")

    def _on_stale(self) -> None:
        self.placement.metrics.count_retry("stale")
        self._end_attempt(OUTCOME_STALE)
        self._join_line()

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
        self._excluded.append(self.worker_id)
        self._silences, self._waiting_since_s = 0, 0.0

    def _raise(self, error: GatewayError) -> None:
        self._end_attempt(OUTCOME_WORKER_FAILED if isinstance(error, WorkerFailed) else OUTCOME_CANCELLED)
        raise error

    def _close(self, outcome: Outcome.ValueType) -> None:
        self._leave_line()
        if not self._closed:
            self._closed = True
            self._end_attempt(outcome)

    def _end_attempt(self, outcome: Outcome.ValueType, cached: CachedTokens | None = None) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        call.cancel()
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
            )
        )
