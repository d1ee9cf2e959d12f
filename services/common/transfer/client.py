"""What the clients of UCX and of shared memory have in common: cached connections, and operations over them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import structlog

from services.common.transfer import wire
from services.common.transfer.connection import Connection
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferError, TransferTimeout
from services.common.transfer.settle import uninterrupted

_MAX_CONNECTIONS = 256
_SETTLE_WARNING_S = 1.0
_log = structlog.get_logger()
C = TypeVar("C", bound=Connection)
R = TypeVar("R")


class Outcome(Generic[R]):
    """Result or error of an operation, set once. Who waits for it wakes in one turn, and cannot cancel it."""

    def __init__(self) -> None:
        self._result: R | None = None
        self._error: TransferError | None = None
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def done(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set_result(self, result: R) -> None:
        """The operation is over and its buffers are free."""
        self._result = result
        self._set()

    def set_exception(self, error: TransferError) -> None:
        """The operation has failed and its buffers are free."""
        self._error = error
        self._set()

    def result(self) -> R:
        """The result. Raises the error."""
        if self._error is not None:
            raise self._error
        assert self._is_set
        return cast(R, self._result)

    async def wait(self, timeout_s: float) -> None:
        """Wait until it is set, or for `timeout_s`. One waiter at a time."""
        if self._is_set:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _wake, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _set(self) -> None:
        assert not self._is_set
        self._is_set = True
        if self._waiter is not None:
            _wake(self._waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Operation(Protocol[R]):
    """A pull or a push under way. `done` is set when its buffers are free, and not before."""

    @property
    def done(self) -> Outcome[R]: ...

    def handle(self, message: wire.ToClient) -> None:
        """A message for it. Raises ProtocolViolation."""

    def fail(self, error: TransferError) -> None:
        """Its connection has failed, and lets go of the buffers."""

    async def stop(self) -> None:
        """Its deadline has passed, or nobody wants it any more: try to end it in an orderly way."""


class Peer(Generic[C]):
    """Operations over one connection."""

    def __init__(self, connection: C) -> None:
        self.connection = connection
        self._operations: dict[int, Operation[Any]] = {}
        self._numbers = itertools.count(1)
        connection.on_message = self._dispatch
        connection.on_failed = self._failed
        connection.start()

    def next_number(self) -> int:
        """A number for an operation."""
        return next(self._numbers)

    async def run(self, number: int, operation: Operation[R], message: wire.Control, deadline_s: float) -> R:
        """Send `message` and wait until `operation` is done, which is not before its buffers are free."""
        if self.connection.error is not None:
            raise PeerLost(str(self.connection.error))
        self._operations[number] = operation
        self.connection.begin()
        try:
            self.connection.send(message)
            await operation.done.wait(deadline_s)
        finally:
            if not operation.done.done():
                await uninterrupted(self._stop(operation))
            del self._operations[number]
            self.connection.end()
        return operation.done.result()

    async def _stop(self, operation: Operation[Any]) -> None:
        """Stop it; else close the connection and wait until the buffers are free."""
        await operation.stop()
        if not operation.done.done():
            self.connection.fail(TransferTimeout("the operation's deadline passed"))
        while not operation.done.done():
            await operation.done.wait(_SETTLE_WARNING_S)
            if not operation.done.done():
                _log.error("buffers of a closed connection are still in use")

    def _dispatch(self, message: wire.AnyControl) -> None:
        if not isinstance(message, wire.ToClient):
            raise ProtocolViolation(f"{type(message).__name__} from a server")
        operation = self._operations.get(message.op)
        if operation is not None:
            operation.handle(message)

    def _failed(self, error: TransferError) -> None:
        for operation in self._operations.values():
            operation.fail(error)


class PeerCache(Generic[C]):
    """One connection for each address, made when it is needed."""

    def __init__(self, connect: Callable[[str], Awaitable[C]]) -> None:
        self._connect = connect
        self._peers: dict[str, Peer[C]] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    async def get(self, address: str, timeout_s: float) -> Peer[C]:
        """Raises TransferError when there is no connection in time."""
        peer = self._peers.get(address)
        if peer is not None and peer.connection.error is None:
            return peer
        try:
            async with asyncio.timeout(timeout_s), self._connecting.setdefault(address, asyncio.Lock()):
                peer = self._peers.get(address)
                if peer is None or peer.connection.error is not None:
                    self._make_room()
                    peer = self._peers[address] = Peer(await self._connect(address))
                return peer
        except TimeoutError:
            raise TransferTimeout("not connected in time") from None
        finally:
            if address not in self._peers and address in self._connecting and not self._connecting[address].locked():
                del self._connecting[address]

    def close(self) -> None:
        """Fail every connection."""
        for peer in list(self._peers.values()):
            peer.connection.fail(PeerLost("closing"))
        self._peers.clear()

    def _make_room(self) -> None:
        """Forget broken connections, and the oldest idle ones beyond the bound."""
        idle = [a for a, peer in self._peers.items() if peer.connection.num_operations == 0]
        surplus = len(self._peers) - _MAX_CONNECTIONS + 1
        for position, address in enumerate(idle):
            peer = self._peers[address]
            if peer.connection.error is not None or position < surplus:
                peer.connection.fail(PeerLost("closing an idle connection"))
                del self._peers[address]
                if address in self._connecting and not self._connecting[address].locked():
                    del self._connecting[address]
