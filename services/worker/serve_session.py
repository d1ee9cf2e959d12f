"""One caller's Serve stream: its attempts, and what they have to say gathered into one message.

What happens while a message is being written waits in the attempts' own bounded queues and goes with the next one, so
that a caller who reads slowly gets larger messages, and one attempt never holds up another. Whatever ends the stream
releases every attempt of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import structlog
from kvmesh.v1 import worker_pb2
from opentelemetry import propagate

from services.common.rpc import caller_context
from services.worker.attempts import Attempt, OwnAttempt
from services.worker.convert import submit_message
from services.worker.errors import Refused
from services.worker.exchange import Exchange, attempt_names
from services.worker.front import Front
from services.worker.kept_streams import KeptStreams
from services.worker.streams import RequestStream

# The engine ends a request at its deadline by itself; this is for an engine that does not answer.
DEADLINE_GRACE_S = 1.0
# Shorter than the 250 ms that are promised, by what a busy host is late.
_HEARTBEAT_S = 0.2
# Events of one message, and refusals that its caller may leave unread.
_BATCH_EVENTS = 2048
_MAX_REFUSALS = 4096
_log = structlog.get_logger()


def submit(
    front: Front, identity: worker_pb2.WorkerIdentity, request: worker_pb2.WorkerGenerateRequest, deadline_s: float
) -> RequestStream:
    """Hand an attempt to the engine, in its caller's trace. Raises Refused, counted and logged."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    traceparent = carrier.get("traceparent", "")
    try:
        if request.model_digest != identity.model_digest:
            raise Refused("FAILED_PRECONDITION", "this replica serves another model")
        return front.submit(
            f"{request.request_id}/{request.attempt}",
            lambda key: submit_message(request, key=key, deadline_s=deadline_s, traceparent=traceparent),
            is_held=request.hold_s > 0,
        )
    except Refused as refusal:
        front.metrics.ended(refusal.code.lower())
        _log.info("request refused", code=refusal.code, detail=refusal.detail, **attempt_names(request))
        raise


class ServeSession:
    """Attempts of one stream: `read` takes what comes up, `batches` gives what goes down, `close` releases all."""

    def __init__(
        self, front: Front, identity: worker_pb2.WorkerIdentity, kept: KeptStreams, *, default_deadline_s: float
    ) -> None:
        self._front = front
        self._kept = kept
        self._identity = identity
        self._default_deadline_s = default_deadline_s
        self._attempts: dict[int, Attempt] = {}
        # Keys of attempts with something to tell, in the order in which they spoke.
        self._speaking: dict[int, None] = {}
        self._refusals: list[worker_pb2.AttemptEvents] = []
        self._is_ending = False
        # The caller goes on to start attempts without reading what becomes of them.
        self.is_unread = False
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._attempts)

    async def read(self, requests: AsyncIterator[worker_pb2.ServeRequest]) -> None:
        """Start, resume and cancel as told, until the caller ends its side or reads no answers."""
        try:
            async for request in requests:
                self._do(request)
                if len(self._refusals) > _MAX_REFUSALS:
                    self.is_unread = True
                    return
        finally:
            self.end()

    def end(self) -> None:
        """Nothing more will be started: `batches` ends with the last attempt."""
        self._is_ending = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[worker_pb2.ServeBatch]:
        """What there is to tell whenever there is something, and a sign of life while there are attempts.

        Ends after `end`, with the last attempt.
        """
        while True:
            was_woken = await self._wait()
            self._wake.clear()
            batch = self._take()
            if self._speaking:
                self._wake.set()
            if batch.attempts:
                yield batch
            elif not was_woken and (sign := self._sign_of_life()) is not None:
                yield sign
            if self.is_unread or (self._is_ending and not self._attempts and not self._refusals):
                return

    def close(self) -> None:
        """Release every attempt. Idempotent."""
        for key in list(self._attempts):
            self._leave(key)
        self._refusals.clear()

    def _sign_of_life(self) -> worker_pb2.ServeBatch | None:
        """Whoever hears nothing takes the engine for stopped, so there must be one that is not."""
        board, now = self._front.board, time.monotonic()
        return None if board.is_silent(now) else worker_pb2.ServeBatch(silent_s=board.computing_silence_s(now))

    async def _wait(self) -> bool:
        """Until there may be something to tell; False when a sign of life is due instead."""
        if not self._attempts:
            return await self._wake.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S):
                return await self._wake.wait()
        return False

    def _do(self, request: worker_pb2.ServeRequest) -> None:
        match request.WhichOneof("action"):
            case "start":
                self._start(request.start)
            case "cancel":
                self._cancel(request.cancel)
            case "resume":
                self._resume(request.resume)
            case "attach":
                self._attach(request.attach)
            case "detach":
                self._leave(request.detach.key, complete=request.detach.complete)

    def _start(self, start: worker_pb2.StartAttempt) -> None:
        context = caller_context(start.metadata)
        try:
            self._check_key(start.key)
            self._take_up(start.key, context.run(self._submit, start, context))
            # From now on there are signs of life.
            self._wake.set()
        except Refused as refusal:
            self._refuse(start.key, refusal)
        except Exception:
            # Whatever is wrong with one start, the others of the stream go on.
            _log.exception("attempt not started", **attempt_names(start.request))
            self._refuse(start.key, Refused("INTERNAL", "the worker could not start the attempt"))

    def _attach(self, attach: worker_pb2.AttachAttempt) -> None:
        try:
            self._check_key(attach.key)
            self._take_up(attach.key, self._kept.attach(attach.request_id))
            self._speak(attach.key)
        except Refused as refusal:
            self._refuse(attach.key, refusal)

    def _check_key(self, key: int) -> None:
        if key in self._attempts:
            self._cancel(key)
            raise Refused("INVALID_ARGUMENT", "two attempts have one key")

    def _take_up(self, key: int, attempt: Attempt) -> None:
        self._attempts[key] = attempt
        attempt.listen(partial(self._speak, key))

    def _refuse(self, key: int, refusal: Refused) -> None:
        end = worker_pb2.AttemptEnd(code=_code(refusal.code), detail=refusal.detail)
        self._refusals.append(worker_pb2.AttemptEvents(key=key, end=end))
        self._wake.set()

    def _submit(self, start: worker_pb2.StartAttempt, context: contextvars.Context) -> Attempt:
        deadline_s = start.deadline_s or self._default_deadline_s
        stream = submit(self._front, self._identity, start.request, deadline_s)
        late = partial(self._front.fail, stream, "DEADLINE_EXCEEDED", "the engine did not answer in time")
        own = OwnAttempt(
            stream,
            Exchange(start.request, self._front, self._identity.worker_id),
            self._front,
            context,
            asyncio.get_running_loop().call_later(deadline_s + DEADLINE_GRACE_S, late),
        )
        return self._kept.keep(start.request, own) if start.request.keep_s > 0 else own

    def _resume(self, resume: worker_pb2.ResumeAttempt) -> None:
        attempt = self._attempts.get(resume.key)
        if attempt is not None:
            attempt.resume(resume.further, hold=resume.hold)

    def _speak(self, key: int) -> None:
        self._speaking[key] = None
        self._wake.set()

    def _cancel(self, key: int) -> None:
        attempt = self._forget(key)
        if attempt is not None:
            attempt.cancel()

    def _leave(self, key: int, *, complete: bool = False) -> None:
        attempt = self._forget(key)
        if attempt is not None:
            attempt.leave(complete=complete)

    def _forget(self, key: int) -> Attempt | None:
        self._speaking.pop(key, None)
        return self._attempts.pop(key, None)

    def _take(self) -> worker_pb2.ServeBatch:
        """Everything there is to tell, as far as one message may go."""
        batch = worker_pb2.ServeBatch(attempts=self._refusals)
        self._refusals.clear()
        num_events = 0
        while self._speaking and num_events < _BATCH_EVENTS:
            key = next(iter(self._speaking))
            del self._speaking[key]
            num_events += self._tell(batch.attempts.add(key=key), self._attempts[key])
        return batch

    def _tell(self, part: worker_pb2.AttemptEvents, attempt: Attempt) -> int:
        """Put an attempt's events into its part; how many, each token counted. Releases it after its last one."""
        part.events.extend(attempt.take())
        if attempt.is_over:
            failure = attempt.failure
            part.end.code = 0 if failure is None else _code(failure.code)
            part.end.detail = "" if failure is None else failure.detail
            self._leave(part.key)
        elif attempt.has_more:
            self._speak(part.key)
        return sum(max(1, len(event.tokens.token_ids)) for event in part.events)


def _code(name: str) -> int:
    """The number of a gRPC status."""
    number: int = grpc.StatusCode[name].value[0]
    return number
