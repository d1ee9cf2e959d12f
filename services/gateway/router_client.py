"""The gateway's side of routing: one Route stream to the active router, and the next router when it fails.

`ask` returns the Grant of an Ask. Asks not yet answered when a stream breaks, or when a router keeps silent, are asked
again on the next router; attempts already granted are no concern of the new one. `done` never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import structlog
from kvmesh.v1.router_pb2 import (
    OUTCOME_CANCELLED,
    REFUSAL_REASON_DEADLINE,
    REFUSAL_REASON_NO_WORKER,
    REFUSAL_REASON_TOO_LARGE,
    REFUSAL_REASON_UNKNOWN_MODEL,
    REFUSAL_REASON_UNSPECIFIED,
    Ask,
    Done,
    Grant,
    ModelSnapshot,
    QueueReport,
    Refusal,
    RouteRequest,
    RouteResponse,
    WatchModelsRequest,
)
from kvmesh.v1.router_pb2_grpc import RouterStub

from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    InternalError,
    ModelNotFound,
    ModelUnavailable,
    ObjectiveUnmet,
    Overloaded,
    TooLargeForWorkers,
    WorkersFull,
)

_OUTBOX_MESSAGES = 16_384
_CYCLE_PAUSE_S = 0.1
_WATCHDOG_S = 0.1
# A router sends its models every 5 s.
_SNAPSHOT_SILENCE_S = 12.0
_log = structlog.get_logger("gateway.router")

Call = grpc.aio.StreamStreamCall[RouteRequest, RouteResponse]


class _RouterLost(Exception):
    """The active router's stream has ended or is silent."""


@dataclass(slots=True)
class _Pending:
    ask: Ask
    deadline_at_s: float
    answer: asyncio.Future[Grant]
    sent_at_s: float = field(default=0.0)

    def message(self, now_s: float) -> RouteRequest:
        self.sent_at_s = now_s
        self.ask.deadline_s = max(0.001, self.deadline_at_s - now_s)
        return RouteRequest(ask=self.ask)


class RouterClient:
    """Owner of the Route stream and of the asks in flight. Run `run` and `watch_models` as tasks."""

    def __init__(self, addresses: Sequence[str], secret: MeshSecret, *, ask_timeout_s: float, silence_s: float) -> None:
        self._secret = secret
        self._channels = {address: open_channel(address) for address in addresses}
        self._addresses = list(addresses)
        self._ask_timeout_s = ask_timeout_s
        self._silence_s = silence_s if len(addresses) > 1 else ask_timeout_s
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._outbox: asyncio.Queue[RouteRequest] = asyncio.Queue(_OUTBOX_MESSAGES)
        self._asked = asyncio.Event()
        self._models_told = asyncio.Event()
        self._heard_at_s = 0.0
        self.failovers = 0
        self.dropped_dones = 0

    @property
    def num_pending(self) -> int:
        """Asks without an answer."""
        return len(self._pending)

    async def ask(self, ask: Ask, deadline_at_s: float) -> Grant:
        """Placement of one attempt. deadline_at_s: monotonic end of the request. Raises GatewayError."""
        key = (ask.request_id, ask.attempt)
        pending = _Pending(ask, deadline_at_s, asyncio.get_running_loop().create_future())
        self._pending[key] = pending
        self._asked.set()
        now_s = time.monotonic()
        try:
            self._outbox.put_nowait(pending.message(now_s))
            async with asyncio.timeout(min(self._ask_timeout_s, deadline_at_s - now_s)):
                return await pending.answer
        except TimeoutError:
            self._give_back(pending)
            if time.monotonic() >= deadline_at_s:
                raise DeadlineExceeded("the deadline passed before the request was placed") from None
            raise Overloaded("no router answers") from None
        except asyncio.QueueFull:
            raise Overloaded("no router answers") from None
        except asyncio.CancelledError:
            self._give_back(pending)
            raise
        finally:
            del self._pending[key]

    def give_back(self, grant: Grant) -> None:
        """Close what was granted, both parts of it, when nobody wants it any more."""
        attempts = (grant.attempt, grant.handoff.attempt) if grant.HasField("handoff") else (grant.attempt,)
        for attempt in attempts:
            self.done(Done(request_id=grant.request_id, attempt=attempt, outcome=OUTCOME_CANCELLED))

    def _give_back(self, pending: _Pending) -> None:
        answer = pending.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self.give_back(answer.result())

    def done(self, done: Done) -> None:
        """Close an attempt; dropped and counted when the outbox is full."""
        try:
            self._outbox.put_nowait(RouteRequest(done=done))
        except asyncio.QueueFull:
            self.dropped_dones += 1

    def report(self, queues: QueueReport) -> None:
        """Say what waits here; dropped when the outbox is full, since another follows."""
        with contextlib.suppress(asyncio.QueueFull):
            self._outbox.put_nowait(RouteRequest(queues=queues))

    async def run(self) -> None:
        """Keep a Route stream to some router until cancelled."""
        index, failed = 0, 0
        while True:
            address = self._addresses[index % len(self._addresses)]
            self._heard_at_s = 0.0
            try:
                await self._session(address)
            except (grpc.aio.AioRpcError, _RouterLost) as error:
                reason = str(error.code().name if isinstance(error, grpc.aio.AioRpcError) else error)
            self.failovers += 1
            failed = 0 if self._heard_at_s else failed + 1
            if failed <= len(self._addresses):
                _log.warning("router_lost", address=address, reason=reason, pending_asks=len(self._pending))
            index += 1
            if failed and failed % len(self._addresses) == 0:
                await asyncio.sleep(_CYCLE_PAUSE_S)

    async def _session(self, address: str) -> None:
        call: Call = RouterStub(self._channels[address]).Route(metadata=call_metadata(self._secret))  # type: ignore[call-arg]
        self._requeue()
        tasks = [asyncio.create_task(part(call)) for part in (self._send, self._receive, self._watch_silence)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [r for r in results if isinstance(r, Exception) and not isinstance(r, asyncio.CancelledError)]
        raise next((error for error in errors if isinstance(error, grpc.aio.AioRpcError)), None) or _lost(errors)

    def _requeue(self) -> None:
        """A new stream begins with every unanswered ask; what the old one had not sent goes after, asks aside."""
        unsent: list[RouteRequest] = []
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if message.HasField("done"):
                unsent.append(message)
        now_s = time.monotonic()
        for message in [*(pending.message(now_s) for pending in self._pending.values()), *unsent][:_OUTBOX_MESSAGES]:
            self._outbox.put_nowait(message)

    async def _send(self, call: Call) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _receive(self, call: Call) -> None:
        async for response in call:
            self._heard_at_s = time.monotonic()
            if response.HasField("grant"):
                self._answer(response.grant.request_id, response.grant.attempt, response.grant)
            elif response.HasField("refusal"):
                self._answer(response.refusal.request_id, response.refusal.attempt, response.refusal)
        raise _RouterLost("the router ended the stream")

    def _answer(self, request_id: str, attempt: int, answer: Grant | Refusal) -> None:
        pending = self._pending.get((request_id, attempt))
        if pending is None or pending.answer.done():
            if isinstance(answer, Grant):
                self.give_back(answer)
        elif isinstance(answer, Grant):
            pending.answer.set_result(answer)
        else:
            pending.answer.set_exception(refusal_error(answer))

    async def _watch_silence(self, call: Call) -> None:
        """Raise _RouterLost when asks stay unanswered; without any, wait without a timer."""
        while True:
            if not self._pending:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(_WATCHDOG_S)
            asked_at_s = min((pending.sent_at_s for pending in self._pending.values()), default=math.inf)
            if time.monotonic() - max(asked_at_s, self._heard_at_s) > self._silence_s:
                raise _RouterLost("silent")

    async def watch_models(self, update: Callable[[ModelSnapshot], None]) -> None:
        """Hand every model snapshot to `update`, from whichever router gives one, until cancelled."""
        index = 0
        while True:
            channel = self._channels[self._addresses[index % len(self._addresses)]]
            call = RouterStub(channel).WatchModels(WatchModelsRequest(), metadata=call_metadata(self._secret))
            try:
                while True:
                    async with asyncio.timeout(_SNAPSHOT_SILENCE_S):
                        snapshot = await call.read()
                    if not isinstance(snapshot, ModelSnapshot):
                        break
                    update(snapshot)
                    self._models_told.set()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _log.debug("model_watch_lost", reason=type(error).__name__)
            finally:
                call.cancel()
            index += 1
            await asyncio.sleep(_CYCLE_PAUSE_S)

    async def models_told(self, within_s: float) -> None:
        """Wait for the first model snapshot, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._models_told.wait()

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close(None)


def _lost(errors: list[Exception]) -> Exception:
    """What ended a stream, by name where nobody foresaw it."""
    known = (error for error in errors if isinstance(error, _RouterLost))
    return next(known, _RouterLost(type(errors[0]).__name__ if errors else "the stream broke"))


def refusal_error(refusal: Refusal) -> GatewayError:
    """The error of a router's refusal."""
    retry_after_s = refusal.retry_after_s or None
    if refusal.reason == REFUSAL_REASON_UNKNOWN_MODEL:
        return ModelNotFound(refusal.detail or "the model does not exist", "model")
    if refusal.reason == REFUSAL_REASON_NO_WORKER:
        return ModelUnavailable(refusal.detail or "no worker is ready", None, retry_after_s)
    if refusal.reason == REFUSAL_REASON_TOO_LARGE:
        return TooLargeForWorkers(refusal.detail or "no worker has room for the request", None, retry_after_s)
    if refusal.reason == REFUSAL_REASON_DEADLINE:
        return ObjectiveUnmet(refusal.detail or "the deadline cannot be met", None, retry_after_s)
    if refusal.reason == REFUSAL_REASON_UNSPECIFIED:
        _log.error("ask_not_understood", request_id=refusal.request_id, detail=refusal.detail)
        return InternalError("the request could not be placed")
    full = WorkersFull(refusal.detail or "every worker is full", None, retry_after_s)
    full.room_in_s = refusal.room_in_s
    return full
