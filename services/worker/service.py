"""The Worker service: the protocol in front of `Front`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from kvmesh.v1 import worker_pb2, worker_pb2_grpc

from services.worker.convert import load_proto
from services.worker.errors import Refused
from services.worker.exchange import Exchange, attempt_names
from services.worker.front import Front
from services.worker.kept_streams import KeptStreams
from services.worker.serve_session import DEADLINE_GRACE_S, ServeSession, submit

# An engine with work speaks more often and an idle one every 200 ms; this repeats its last word while a step is long.
REPORT_EVERY_S = 0.25

_log = structlog.get_logger()
_GenerateContext = grpc.aio.ServicerContext[worker_pb2.WorkerGenerateRequest, worker_pb2.WorkerGenerateResponse]
_ServeContext = grpc.aio.ServicerContext[worker_pb2.ServeRequest, worker_pb2.ServeBatch]
_WatchContext = grpc.aio.ServicerContext[worker_pb2.WatchRequest, worker_pb2.WorkerReport]
_DrainContext = grpc.aio.ServicerContext[worker_pb2.DrainRequest, worker_pb2.DrainResponse]


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model as calls see it. closing: set when it goes, which ends every Watch stream. sessions: open ones."""

    front: Front
    identity: worker_pb2.WorkerIdentity
    kept: KeptStreams
    closing: asyncio.Event
    sessions: set[ServeSession]


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Generate, Serve, Watch and Drain of the replica that is attached; UNAVAILABLE while there is none."""

    def __init__(self, *, default_deadline_s: float, drain: Callable[[], Awaitable[None]]) -> None:
        """drain: stops admissions and turns readiness off."""
        self._served: Served | None = None
        self._drain = drain
        self._default_deadline_s = default_deadline_s

    def attach(self, front: Front, identity: worker_pb2.WorkerIdentity, kept: KeptStreams) -> None:
        """Serve this replica from now on."""
        self._served = Served(front, identity, kept, asyncio.Event(), set())

    def detach(self) -> None:
        """Serve none, and end every stream: Watch at once, Serve with its last attempt. Idempotent."""
        served, self._served = self._served, None
        if served is not None:
            served.closing.set()
            served.kept.close()
            for session in served.sessions:
                session.end()

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Run one attempt; see the protocol."""
        served = await self._attached(context)
        front = served.front
        remaining_s = context.time_remaining()
        deadline_s = self._default_deadline_s if remaining_s is None else remaining_s
        try:
            stream = submit(front, served.identity, request, deadline_s)
        except Refused as refusal:
            await context.abort(grpc.StatusCode[refusal.code], refusal.detail)
        # A cancelled call may never come back to this generator; its end is what releases the request.
        context.add_done_callback(lambda _: front.release(stream))  # type: ignore[arg-type]
        exchange = Exchange(request, front, served.identity.worker_id)
        try:
            async with asyncio.timeout(deadline_s + DEADLINE_GRACE_S):
                while not exchange.is_over:
                    for response in exchange.responses(await stream.take()):
                        yield response
        except TimeoutError:
            _log.error("the engine did not answer in time", **attempt_names(request))
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the engine did not answer in time")
        finally:
            front.release(stream)
        if exchange.failure is not None:
            await context.abort(grpc.StatusCode[exchange.failure.code], exchange.failure.detail)

    async def Serve(
        self, request_iterator: AsyncIterator[worker_pb2.ServeRequest], context: _ServeContext
    ) -> AsyncIterator[worker_pb2.ServeBatch]:
        """Run the attempts of one caller; see the protocol."""
        served = await self._attached(context)
        session = ServeSession(served.front, served.identity, served.kept, default_deadline_s=self._default_deadline_s)
        reading = asyncio.create_task(session.read(request_iterator))
        served.sessions.add(session)

        def close(_: object = None) -> None:
            reading.cancel()
            session.close()
            served.sessions.discard(session)

        # As above: the call's end is what releases everything.
        context.add_done_callback(close)  # type: ignore[arg-type]
        try:
            async for batch in session.batches():
                yield batch
            if session.is_unread:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answers of this stream are not read")
        finally:
            close()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: _WatchContext
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        """Report until the watcher or the worker goes; silent while the engine is."""
        served = await self._attached(context)
        board = served.front.board
        with board.watch() as watcher:
            silent_s = board.computing_silence_s(time.monotonic())
            yield worker_pb2.WorkerReport(identity=served.identity, load=load_proto(board), silent_s=silent_s)
            while not served.closing.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await watcher.wake.wait()
                watcher.wake.clear()
                now = time.monotonic()
                if board.is_silent(now):
                    continue
                admitted, ended = watcher.take()
                yield worker_pb2.WorkerReport(
                    load=load_proto(board, admitted=admitted, ended=ended), silent_s=board.computing_silence_s(now)
                )

    async def Drain(self, request: worker_pb2.DrainRequest, context: _DrainContext) -> worker_pb2.DrainResponse:
        """Stop admitting."""
        await self._drain()
        return worker_pb2.DrainResponse()

    async def _attached(self, context: grpc.aio.ServicerContext[Any, Any]) -> Served:
        if self._served is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no model is loaded")
        assert self._served is not None
        return self._served
