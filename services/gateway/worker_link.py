"""All attempts of this gateway at one worker, over one Serve stream: each has its own inbox and its own end.

The reader never waits for an attempt: one that leaves its inbox full is let go, and no other notices. When the stream
ends, exactly its attempts end with its status. A worker beats while the stream has attempts; when it does not, be it
dead, stopped, cut off or out of reach from the start, the link ends. A link is used once; the next attempt opens
another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence

import grpc
import grpc.aio
import structlog
from kvmesh.v1.worker_pb2 import (
    AttachAttempt,
    DetachAttempt,
    KnownOutput,
    ResumeAttempt,
    ServeBatch,
    ServeRequest,
    StartAttempt,
    WorkerGenerateRequest,
    WorkerGenerateResponse,
)
from kvmesh.v1.worker_pb2_grpc import WorkerStub

from services.common.rpc import MAX_MESSAGE_BYTES, call_metadata
from services.common.security import MeshSecret

# As many as a worker keeps for a reader by default.
_MAX_UNREAD = 1024
# What of the time between two looks counts as silence: in a longer pause of this process nobody could be heard.
_MAX_LOOK_S = 0.2
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_log = structlog.get_logger("gateway.worker_link")

Call = grpc.aio.StreamStreamCall[ServeRequest, ServeBatch]


class AttemptEnded(Exception):
    """Nothing more comes of an attempt. code OK: it has said everything."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class LinkSilent(AttemptEnded):
    """The worker of an attempt has not even said that it is alive."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, "the worker is silent")


class Attempt:
    """One attempt: `read` until it ends, or `cancel`."""

    __slots__ = ("_end", "_link", "_protocol", "_unread", "_waiter", "key")

    def __init__(self, link: WorkerLink, key: int, protocol: int = 0) -> None:
        """protocol: least that the worker must tell with its admission, or the attempt ends as UNIMPLEMENTED."""
        self.key = key
        self._link = link
        self._protocol = protocol
        self._unread: deque[WorkerGenerateResponse] = deque()
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> WorkerGenerateResponse:
        """The next message. Raises AttemptEnded after the last one, CancelledError after `cancel`."""
        while not self._unread:
            if self._end is not None:
                raise self._end
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                # A reader that was cancelled may find that another has come after it.
                if self._waiter is waiter:
                    self._waiter = None
        return self._unread.popleft()

    @property
    def unread(self) -> Sequence[WorkerGenerateResponse]:
        """What has come and was not read."""
        return self._unread

    @property
    def is_awaited(self) -> bool:
        """Whether a reader waits for the next message, and will have it as soon as it comes."""
        return self._waiter is not None and not self._unread

    def resume(self, further: Sequence[KnownOutput], *, hold: bool = False) -> None:
        """Let the worker draw on from here, if it waits for that. hold: let it compute that and wait on."""
        self._link.resume(self.key, further, hold=hold)

    def hand_over(self) -> None:
        """Its reader has taken what is unread and goes on elsewhere: the worker releases everything, reads end."""
        self._unread.clear()
        self.break_off(AttemptEnded(grpc.StatusCode.CANCELLED, "it goes on elsewhere"))

    def cancel(self) -> None:
        """Have the worker release everything; ends a read in progress. Idempotent."""
        self.break_off(asyncio.CancelledError())

    def leave(self, *, complete: bool) -> None:
        """The same of an attempt that the worker is to keep. complete: it need not compute the rest."""
        detach = DetachAttempt(key=self.key, complete=complete)
        self.break_off(asyncio.CancelledError(), ServeRequest(detach=detach))

    def break_off(self, end: BaseException, farewell: ServeRequest | None = None) -> bool:
        """The same, and reads raise `end`; what is unread is dropped. False when it has ended already.

        farewell: in place of the cancel.
        """
        if self._end is not None:
            return False
        self._link.forget(self.key, farewell)
        self._unread.clear()
        self.put((), end)
        return True

    def put(self, messages: Sequence[WorkerGenerateResponse], end: BaseException | None = None) -> None:
        """Messages that have come, and what is raised after them when they are the last. Nothing follows an end."""
        if self._end is not None:
            return
        if self._protocol and any(self._is_too_old(message) for message in messages):
            self._link.forget(self.key)
            messages, end = (), AttemptEnded(grpc.StatusCode.UNIMPLEMENTED, "the worker is of too old a release")
        self._unread.extend(messages)
        if end is None and len(self._unread) > _MAX_UNREAD:
            self._link.forget(self.key)
            _log.warning("a stream is not read", unread=len(self._unread))
            end = AttemptEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream is read too slowly")
        self._end = end
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_too_old(self, message: WorkerGenerateResponse) -> bool:
        return message.HasField("admitted") and message.admitted.protocol < self._protocol


class WorkerLink:
    """Owner of one Serve stream and of the attempts on it."""

    def __init__(self, stub: WorkerStub, secret: MeshSecret, silence_s: float) -> None:
        """Opens the stream. The current context, and so its trace, is that of the stream, not of any attempt.

        silence_s: of the worker, before the link ends.
        """
        self._silence_s = silence_s
        self._quiet_s = 0.0
        self._looked_at_s = 0.0
        # Events of attempts that nobody wanted any more.
        self.late_events = 0
        self.is_silent = False
        self._attempts: dict[int, Attempt] = {}
        self._keys = itertools.count(1)
        # Not sent yet. Starts and resumes are of attempts that have not ended: of each request in flight one start, and
        # while it moves two; while two draw beside each other, a resume for each token of the first. Cancels go first,
        # of starts that were sent before: there are no more of them than that.
        self._starts: dict[int, ServeRequest] = {}
        self._cancels: list[ServeRequest] = []
        self._resumes: dict[int, deque[ResumeAttempt]] = {}
        self._wake = asyncio.Event()
        self.is_open = True
        self._call: Call = stub.Serve(metadata=call_metadata(secret))  # type: ignore[call-arg, assignment]
        self._tasks = [asyncio.create_task(part()) for part in (self._receive, self._send)]

    def __len__(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    def start(
        self, request: WorkerGenerateRequest, *, deadline_s: float, metadata: Mapping[str, str], protocol: int = 0
    ) -> Attempt:
        """Begin an attempt. deadline_s: seconds left. metadata: trace context and request id. protocol: see Attempt."""
        attempt = Attempt(self, next(self._keys), protocol)
        start = StartAttempt(key=attempt.key, request=request, deadline_s=deadline_s, metadata=metadata)
        message = ServeRequest(start=start)
        if message.ByteSize() > MAX_MESSAGE_BYTES:
            # Sent, it would end the stream, and with it all attempts.
            attempt.put((), AttemptEnded(grpc.StatusCode.INVALID_ARGUMENT, "the request is too large"))
            return attempt
        self._begin(attempt, message)
        return attempt

    def attach(self, request_id: str, *, metadata: Mapping[str, str]) -> Attempt:
        """Read an attempt that the worker keeps."""
        attempt = Attempt(self, next(self._keys))
        attach = AttachAttempt(key=attempt.key, request_id=request_id, metadata=metadata)
        self._begin(attempt, ServeRequest(attach=attach))
        return attempt

    def resume(self, key: int, further: Sequence[KnownOutput], *, hold: bool = False) -> None:
        """An attempt with hold_s is to draw on; nothing for one that has ended. further, hold: as in the message."""
        if key in self._attempts:
            resume = ResumeAttempt(key=key, further=further, hold=hold)
            self._resumes.setdefault(key, deque()).append(resume)
            self._wake.set()

    def forget(self, key: int, farewell: ServeRequest | None = None) -> None:
        """Nobody wants this attempt any more. Idempotent, and nothing for one that has ended.

        farewell: what the worker is told, if not to cancel it.
        """
        if self._attempts.pop(key, None) is None:
            return
        self._resumes.pop(key, None)
        if self._starts.pop(key, None) is None and self.is_open:
            self._cancels.append(farewell or ServeRequest(cancel=key))
            self._wake.set()

    def _begin(self, attempt: Attempt, message: ServeRequest) -> None:
        if not self._attempts:
            self._quiet_s, self._looked_at_s = 0.0, time.monotonic()
        self._attempts[attempt.key] = attempt
        self._starts[attempt.key] = message
        self._wake.set()

    def close(self) -> None:
        """End the stream, and with it every attempt. Idempotent."""
        self._end(AttemptEnded(grpc.StatusCode.CANCELLED, "the gateway has closed the stream"))

    def pulse(self, now_s: float) -> None:
        """Look for silence. now_s: monotonic time."""
        elapsed_s, self._looked_at_s = now_s - self._looked_at_s, now_s
        self._quiet_s += min(elapsed_s, _MAX_LOOK_S)
        if self._attempts and self._quiet_s > self._silence_s:
            _log.warning("link_silent", attempts=len(self._attempts))
            self.is_silent = True
            self._end(LinkSilent())

    async def _receive(self) -> None:
        try:
            while isinstance(batch := await self._call.read(), ServeBatch):
                self._dispatch(batch)
            self._end(AttemptEnded(grpc.StatusCode.UNAVAILABLE, "the worker has closed the stream"))
        except grpc.aio.AioRpcError as error:
            self._end(AttemptEnded(error.code(), error.details() or ""))
        finally:
            self._end(AttemptEnded(grpc.StatusCode.INTERNAL, "the stream could not be read"))

    def _dispatch(self, batch: ServeBatch) -> None:
        self._quiet_s = 0.0 if batch.attempts else batch.silent_s
        for part in batch.attempts:
            attempt = self._attempts.get(part.key)
            if attempt is None:
                self.late_events += len(part.events)
                continue
            if part.HasField("end"):
                del self._attempts[part.key]
                self._resumes.pop(part.key, None)
                code = _CODES.get(part.end.code, grpc.StatusCode.UNKNOWN)
                attempt.put(part.events, AttemptEnded(code, part.end.detail))
            else:
                attempt.put(part.events)

    async def _send(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while message := self._next():
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream is over; the receiver learns why.
            return

    def _next(self) -> ServeRequest | None:
        if self._cancels:
            return self._cancels.pop()
        if self._starts:
            return self._starts.pop(next(iter(self._starts)))
        # After the starts, among which may be its own.
        return self._next_resume() if self._resumes else None

    def _next_resume(self) -> ServeRequest:
        key, waiting = next(iter(self._resumes.items()))
        resume = waiting.popleft()
        if not waiting:
            del self._resumes[key]
        return ServeRequest(resume=resume)

    def _end(self, end: AttemptEnded) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        attempts, self._attempts = list(self._attempts.values()), {}
        for attempt in attempts:
            attempt.put((), end)
