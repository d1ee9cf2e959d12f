"""What a Serve stream holds of each of its attempts: one of its own, or a reader of one that is kept."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from typing import Protocol

from kvmesh.v1 import worker_pb2

from services.worker.convert import known_outputs
from services.worker.exchange import Exchange
from services.worker.front import Front
from services.worker.messages import RequestFailed
from services.worker.streams import RequestStream


class Attempt(Protocol):
    """Read with `take` until it is over; then, or before, `leave` or `cancel`, both idempotent.

    stream: the engine's side of it.
    """

    stream: RequestStream

    @property
    def is_over(self) -> bool:
        """Whether everything has been taken, and nothing follows."""

    @property
    def has_more(self) -> bool:
        """Whether `take` has left something."""

    @property
    def failure(self) -> RequestFailed | None:
        """How it ended, if not well."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever there is something to take."""

    def take(self) -> list[worker_pb2.WorkerGenerateResponse]:
        """What has been said since the last call, as far as one message may go."""

    def resume(self, further: Iterable[worker_pb2.KnownOutput], *, hold: bool) -> None:
        """Draw on after what has become known, or with `hold` only compute it."""

    def leave(self, *, complete: bool = False) -> None:
        """This caller reads no more. complete: nothing more need be computed, either."""

    def cancel(self) -> None:
        """Nobody wants it any more."""


class OwnAttempt:
    """An attempt that ends with its caller.

    context: its caller's, for spans and log lines. overdue: fires when the engine has forgotten its deadline.
    """

    def __init__(
        self,
        stream: RequestStream,
        exchange: Exchange,
        front: Front,
        context: contextvars.Context,
        overdue: asyncio.TimerHandle,
    ) -> None:
        self.stream = stream
        self._exchange = exchange
        self._front = front
        self._context = context
        self._overdue = overdue

    @property
    def is_over(self) -> bool:
        """See Attempt."""
        return self._exchange.is_over

    @property
    def has_more(self) -> bool:
        """Nothing: `take` gives all."""
        return False

    @property
    def failure(self) -> RequestFailed | None:
        """See Attempt."""
        return self._exchange.failure

    def listen(self, listener: Callable[[], None]) -> None:
        """See Attempt."""
        self.stream.listener = listener

    def take(self) -> list[worker_pb2.WorkerGenerateResponse]:
        """All that has been said: the stream's queue is bounded."""
        return self._context.run(list, self._exchange.responses(self.stream.drain()))

    def resume(self, further: Iterable[worker_pb2.KnownOutput], *, hold: bool) -> None:
        """See Attempt."""
        self._front.resume(self.stream, known_outputs(further), hold=hold)

    def leave(self, *, complete: bool = False) -> None:
        """Release everything."""
        self._overdue.cancel()
        self._front.release(self.stream)

    def cancel(self) -> None:
        """Release everything."""
        self.leave()
