"""The Worker service: the protocol in front of `Front`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import grpc
import grpc.aio
import structlog
from kvmesh.v1 import worker_pb2, worker_pb2_grpc
from opentelemetry import context as otel_context
from opentelemetry import propagate

from services.worker.convert import chunk_proto, completed_proto, finish_proto, load_proto, submit_message
from services.worker.errors import Refused
from services.worker.front import Front
from services.worker.messages import AdmittedRequest, ChoiceOutput, RequestFailed, RequestUsage, StaleRequest
from services.worker.observation import record_spans
from services.worker.streams import Event, RequestStream

# An engine with work speaks more often and an idle one every 200 ms; this repeats its last word while a step is long.
REPORT_EVERY_S = 0.25
# The engine ends a request at its deadline by itself; this is for an engine that does not answer.
_DEADLINE_GRACE_S = 1.0

_log = structlog.get_logger()
_GenerateContext = grpc.aio.ServicerContext[worker_pb2.WorkerGenerateRequest, worker_pb2.WorkerGenerateResponse]
_WatchContext = grpc.aio.ServicerContext[worker_pb2.WatchRequest, worker_pb2.WorkerReport]
_DrainContext = grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse]


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model as calls see it. closing: set when it goes, which ends every Watch stream."""

    front: Front
    identity: worker_pb2.WorkerIdentity
    closing: asyncio.Event


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Generate, Watch and Drain of the replica that is attached; UNAVAILABLE while there is none."""

    def __init__(self, *, default_deadline_s: float, drain: Callable[[], Awaitable[None]]) -> None:
        """drain: stops admissions and turns readiness off."""
        self._served: Served | None = None
        self._drain = drain
        self._default_deadline_s = default_deadline_s

    def attach(self, front: Front, identity: worker_pb2.WorkerIdentity) -> None:
        """Serve this replica from now on."""
        self._served = Served(front, identity, asyncio.Event())

    def detach(self) -> None:
        """Serve none, and end every Watch stream. Idempotent."""
        served, self._served = self._served, None
        if served is not None:
            served.closing.set()

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Run one attempt; see the protocol."""
        served = await self._attached(context)
        front = served.front
        remaining_s = context.time_remaining()
        deadline_s = self._default_deadline_s if remaining_s is None else remaining_s
        try:
            stream = _submit(served, request, deadline_s)
        except Refused as refusal:
            front.metrics.ended(refusal.code.lower())
            _log.info("request refused", code=refusal.code, detail=refusal.detail, **_names(request))
            await context.abort(grpc.StatusCode[refusal.code], refusal.detail)
        # A cancelled call may never come back to this generator; its end is what releases the request.
        context.add_done_callback(lambda _: front.release(stream))  # type: ignore[arg-type]
        exchange = _Exchange(request, stream, front, served.identity.worker_id)
        try:
            async with asyncio.timeout(deadline_s + _DEADLINE_GRACE_S):
                while not exchange.is_over:
                    for response in exchange.responses(await stream.take()):
                        yield response
        except TimeoutError:
            _log.error("the engine did not answer in time", **_names(request))
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the engine did not answer in time")
        finally:
            front.release(stream)
        if exchange.failure is not None:
            await context.abort(grpc.StatusCode[exchange.failure.code], exchange.failure.detail)

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: _WatchContext
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        """Report until the watcher or the worker goes; silent while the engine is."""
        served = await self._attached(context)
        board = served.front.board
        with board.watch() as watcher:
            yield worker_pb2.WorkerReport(identity=served.identity, load=load_proto(board))
            while not served.closing.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await watcher.wake.wait()
                watcher.wake.clear()
                if board.is_silent(time.monotonic()):
                    continue
                admitted, ended = watcher.take()
                yield worker_pb2.WorkerReport(load=load_proto(board, admitted=admitted, ended=ended))

    async def Drain(self, request: worker_pb2.DrainRequest, context: _DrainContext) -> worker_pb2.DrainResponse:
        """Stop admitting."""
        await self._drain()
        return worker_pb2.DrainResponse()

    async def _attached(self, context: _GenerateContext | _WatchContext) -> Served:
        if self._served is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no model is loaded")
        assert self._served is not None
        return self._served


def _submit(served: Served, request: worker_pb2.WorkerGenerateRequest, deadline_s: float) -> RequestStream:
    if request.model_digest != served.identity.model_digest:
        raise Refused("FAILED_PRECONDITION", "this replica serves another model")
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return served.front.submit(
        f"{request.request_id}/{request.attempt}",
        lambda key: submit_message(request, key=key, deadline_s=deadline_s, traceparent=carrier.get("traceparent", "")),
    )


class _Exchange:
    """Turns the events of one stream into responses and notes how it ended."""

    def __init__(
        self, request: worker_pb2.WorkerGenerateRequest, stream: RequestStream, front: Front, worker_id: str
    ) -> None:
        self.is_over = False
        self.failure: RequestFailed | None = None
        self._request = request
        self._stream = stream
        self._front = front
        self._worker_id = worker_id
        self._parent = otel_context.get_current()
        self._submitted_ns = time.time_ns()

    def responses(self, events: list[Event]) -> Iterator[worker_pb2.WorkerGenerateResponse]:
        """Responses for a batch of events; tokens of one choice that wait together go together."""
        for _, group in groupby(events, key=_group_of):
            run = list(group)
            outputs = [event for event in run if isinstance(event, ChoiceOutput)]
            if outputs:
                yield chunk_proto(outputs)
                if outputs[-1].finish:
                    yield finish_proto(outputs[-1])
            else:
                yield from self._other(run[0])

    def _other(self, event: Event) -> Iterator[worker_pb2.WorkerGenerateResponse]:
        match event:
            case AdmittedRequest(cached_tokens=cached_tokens):
                admitted = worker_pb2.Admitted(worker_id=self._worker_id, cached_tokens=cached_tokens)
                yield worker_pb2.WorkerGenerateResponse(admitted=admitted)
            case StaleRequest():
                self.is_over = True
                self._front.metrics.ended("stale")
                stale = worker_pb2.Stale(load=load_proto(self._front.board))
                yield worker_pb2.WorkerGenerateResponse(stale=stale)
            case RequestFailed():
                self.is_over = True
                self.failure = event
                self._front.metrics.ended(event.code.lower())
                _log.info("request failed", code=event.code, **_names(self._request))
            case RequestUsage():
                self.is_over = True
                self._complete(event)
                yield completed_proto(event)

    def _complete(self, usage: RequestUsage) -> None:
        self._front.metrics.finished(usage)
        record_spans(usage, parent=self._parent, submitted_ns=self._submitted_ns, ended_ns=time.time_ns())
        _log.info(
            "request completed",
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_local=usage.cached_local,
            cached_remote=usage.cached_peer + usage.cached_ram + usage.cached_ssd,
            queue_s=round(usage.queue_s, 4),
            pull_s=round(usage.pull_s, 4),
            prefill_s=round(usage.prefill_s, 4),
            **_names(self._request),
        )


def _names(request: worker_pb2.WorkerGenerateRequest) -> dict[str, object]:
    """For log lines."""
    return {"request_id": request.request_id, "attempt": request.attempt}


def _group_of(event: Event) -> tuple[int, int]:
    """Consecutive outputs of a choice share a group; any other event is one of its own."""
    return (0, event.choice) if isinstance(event, ChoiceOutput) else (1, id(event))
