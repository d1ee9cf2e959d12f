"""The client's side of the UCX transport: pulls and pushes over cached connections.

A pull's buffers are posted as the holder announces its blocks, so nothing is ever posted that will not be sent; the
payload itself waits at the sender (rendezvous) and lands in the buffer without a copy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

import structlog

from services.common.blocks import join_ids
from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferError, TransferTimeout
from services.common.transfer.protocol import (
    STOP_CANCELLED,
    STOP_DEADLINE,
    STOP_GRACE_S,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
)
from services.common.transfer.settle import uninterrupted
from services.common.transfer.ucx_connection import UcxConnection
from services.common.transfer.ucx_reactor import Completed, UcxReactor

_MAX_CONNECTIONS = 256
_SETTLE_WARNING_S = 1.0
_log = structlog.get_logger()


class UcxTransport:
    """Transport over UCX."""

    name = "ucx"

    def __init__(self, reactor: UcxReactor, key: bytes) -> None:
        self._reactor = reactor
        self._key = key
        self._peers: dict[str, _Peer] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`."""
        connected = await self._connected(peer.pull_address, request.deadline_s)
        return await connected.pull(request, buffers, on_block)

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`."""
        connected = await self._connected(peer.pull_address, request.deadline_s)
        return await connected.push(request)

    async def close(self) -> None:
        """Fail every connection."""
        for peer in list(self._peers.values()):
            peer.connection.fail(PeerLost("closing"))
        self._peers.clear()

    async def _connected(self, address: str, timeout_s: float) -> _Peer:
        try:
            async with asyncio.timeout(timeout_s), self._connecting.setdefault(address, asyncio.Lock()):
                peer = self._peers.get(address)
                if peer is None or peer.connection.error is not None:
                    self._make_room()
                    peer = self._peers[address] = await self._connect(address)
                return peer
        except TimeoutError:
            raise TransferTimeout("not connected in time") from None

    async def _connect(self, address: str) -> _Peer:
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit():
            raise PeerLost(f"{address!r} is no pull address")
        return _Peer(await UcxConnection.connect(self._reactor.connect(host, int(port)), self._key))

    def _make_room(self) -> None:
        """Forget broken connections, and the oldest idle ones beyond the bound."""
        idle = [a for a, peer in self._peers.items() if peer.connection.num_operations == 0]
        surplus = len(self._peers) - _MAX_CONNECTIONS + 1
        for position, address in enumerate(idle):
            peer = self._peers[address]
            if peer.connection.error is not None or position < surplus:
                peer.connection.fail(PeerLost("closing an idle connection"))
                del self._peers[address]
                if not self._connecting[address].locked():
                    del self._connecting[address]


class _Peer:
    """Operations over one connection."""

    def __init__(self, connection: UcxConnection) -> None:
        self.connection = connection
        self._operations: dict[int, _PullOperation | _PushOperation] = {}
        self._numbers = itertools.count(1)
        connection.on_message = self._dispatch
        connection.on_failed = self._failed
        connection.start()

    async def pull(self, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock) -> PullResult:
        number = next(self._numbers)
        operation = _PullOperation(self.connection, buffers, on_block)
        message = wire.Pull(
            number, join_ids(request.ids), request.epoch, request.deadline_s, request.traceparent, request.request_id
        )
        await self._run(number, operation, message, request.deadline_s)
        result: PullResult = operation.done.result()
        return result

    async def push(self, request: PushRequest) -> PushResult:
        number = next(self._numbers)
        operation = _PushOperation(self.connection, request.payloads)
        message = wire.Offer(number, list(request.headers), request.epoch, request.deadline_s, request.traceparent)
        await self._run(number, operation, message, request.deadline_s)
        result: PushResult = operation.done.result()
        return result

    async def _run(
        self, number: int, operation: _PullOperation | _PushOperation, message: wire.Control, deadline_s: float
    ) -> None:
        """Returns when `operation.done` is, which is not before its buffers are free."""
        if self.connection.error is not None:
            raise PeerLost(str(self.connection.error))
        self._operations[number] = operation
        self.connection.begin()
        try:
            self.connection.send(message)
            await asyncio.wait({operation.done}, timeout=deadline_s)
        finally:
            if not operation.done.done():
                await uninterrupted(self._stop(number, operation))
            del self._operations[number]
            self.connection.end()
            # Retrieved here too: a cancelled caller never looks.
            operation.done.exception()

    async def _stop(self, number: int, operation: _PullOperation | _PushOperation) -> None:
        """Ask for the end of a pull; then close the connection and wait until UCX is done with the buffers."""
        if isinstance(operation, _PullOperation):
            operation.stop = STOP_DEADLINE
            self.connection.send(wire.Cancel(number))
            await asyncio.wait({operation.done}, timeout=STOP_GRACE_S)
        if not operation.done.done():
            self.connection.fail(TransferTimeout("the operation's deadline passed"))
        while not operation.done.done():
            await asyncio.wait({operation.done}, timeout=_SETTLE_WARNING_S)
            if not operation.done.done():
                _log.error("UCX still holds buffers of a closed connection", buffers=operation.outstanding)

    def _dispatch(self, message: wire.AnyControl) -> None:
        if not isinstance(message, wire.Blocks | wire.PullEnd | wire.Accept | wire.PushEnd):
            raise ProtocolViolation(f"{type(message).__name__} from a server")
        operation = self._operations.get(message.op)
        if operation is not None:
            operation.handle(message)

    def _failed(self, error: TransferError) -> None:
        for operation in self._operations.values():
            operation.fail(error)


class _PullOperation:
    """Counts buffers that UCX holds; `done` waits for zero."""

    def __init__(self, connection: UcxConnection, buffers: Sequence[memoryview], on_block: OnBlock) -> None:
        self.done: asyncio.Future[PullResult] = asyncio.get_running_loop().create_future()
        self.outstanding = 0
        self.stop = STOP_CANCELLED
        self._connection = connection
        self._buffers = buffers
        self._on_block = on_block
        self._announced: list[tuple[bytes, str]] = []
        self._arrived: set[int] = set()
        self._reported = 0
        self._end: wire.PullEnd | None = None
        self._error: TransferError | None = None

    def handle(self, message: wire.ToClient) -> None:
        if isinstance(message, wire.Blocks):
            self._post(message)
        elif isinstance(message, wire.PullEnd) and message.num_blocks == len(self._announced):
            self._end = message
        else:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a pull")
        self._check()

    def fail(self, error: TransferError) -> None:
        self._error = self._error or error
        self._check()

    def _post(self, message: wire.Blocks) -> None:
        first, count = message.first, len(message.headers)
        if first != len(self._announced) or first + count > len(self._buffers) or count != len(message.tiers):
            raise ProtocolViolation("blocks that were not asked for")
        self._announced.extend(zip(message.headers, message.tiers, strict=True))
        for offset in range(count):
            self.outstanding += 1
            received = self._connection.endpoint.tag_recv(self._buffers[first + offset], message.tag + offset)
            received.add_done_callback(partial(self._received, first + offset))
        if message.stop is not None:
            self._end = wire.PullEnd(message.op, len(self._announced), message.stop)

    def _received(self, index: int, future: Completed) -> None:
        self.outstanding -= 1
        if (error := future.exception()) is not None:
            self._connection.fail(PeerLost(str(error)))
            self.fail(PeerLost(str(error)))
            return
        self._connection.heard()
        self._arrived.add(index)
        while self._reported in self._arrived:
            self._arrived.discard(self._reported)
            header, tier = self._announced[self._reported]
            self._on_block(self._reported, header, tier)
            self._reported += 1
        self._check()

    def _check(self) -> None:
        if self.outstanding or self.done.done():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        elif self._end is not None:
            stop = self.stop if self._end.stop == STOP_CANCELLED else self._end.stop
            self.done.set_result(PullResult(self._end.num_blocks, stop))


class _PushOperation:
    """An offer, then the payloads of what was accepted, then the answer."""

    def __init__(self, connection: UcxConnection, payloads: Sequence[memoryview]) -> None:
        self.done: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
        self.outstanding = 0
        self._connection = connection
        self._payloads = payloads
        self._accepted: int | None = None
        self._end: wire.PushEnd | None = None
        self._error: TransferError | None = None

    def handle(self, message: wire.ToClient) -> None:
        if isinstance(message, wire.Accept) and self._accepted is None:
            self._accepted = message.first + message.num_blocks
            if self._accepted > len(self._payloads):
                raise ProtocolViolation("more blocks accepted than offered")
            for offset, payload in enumerate(self._payloads[message.first : self._accepted]):
                self.outstanding += 1
                self._connection.endpoint.tag_send(payload, message.tag + offset).add_done_callback(self._sent)
        elif isinstance(message, wire.PushEnd) and message.accepted <= (self._accepted or 0):
            self._end = message
        else:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a push")
        self._check()

    def fail(self, error: TransferError) -> None:
        self._error = self._error or error
        self._check()

    def _sent(self, future: Completed) -> None:
        self.outstanding -= 1
        if (error := future.exception()) is not None:
            self._connection.fail(PeerLost(str(error)))
            self.fail(PeerLost(str(error)))
        self._check()

    def _check(self) -> None:
        if self.outstanding or self.done.done():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        elif self._end is not None:
            self.done.set_result(PushResult(self._end.accepted, len(self._payloads) - self._end.accepted))
