"""The client's side of the UCX transport: pulls and pushes over cached connections.

A pull's buffers are posted as the holder announces its blocks, so nothing is ever posted that will not be sent; the
payload itself waits at the sender (rendezvous) and lands in the buffer without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from services.common.transfer import wire
from services.common.transfer.client import Outcome, PeerCache
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferError
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
from services.common.transfer.ucx_connection import UcxConnection
from services.common.transfer.ucx_groups import Extent, run_lengths, span
from services.common.transfer.ucx_reactor import UcxReactor

_MAX_PORT = 65535


class UcxTransport:
    """Transport over UCX."""

    name = "ucx"

    def __init__(self, reactor: UcxReactor, key: bytes) -> None:
        self._reactor = reactor
        self._key = key
        self._peers: PeerCache[UcxConnection] = PeerCache(self._connect)

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`."""
        connected = await self._peers.get(peer.pull_address, request.deadline_s)
        number = connected.next_number()
        extents = [connected.connection.endpoint.extent(buffer) for buffer in buffers]
        operation = _PullOperation(connected.connection, number, buffers, extents, on_block)
        message = wire.Pull.of(number, request, run_lengths(extents))
        return await connected.run(number, operation, message, request.deadline_s)

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`."""
        connected = await self._peers.get(peer.pull_address, request.deadline_s)
        number = connected.next_number()
        operation = _PushOperation(connected.connection, request.payloads)
        message = wire.Offer(number, list(request.headers), request.epoch, request.deadline_s, request.traceparent)
        return await connected.run(number, operation, message, request.deadline_s)

    async def close(self) -> None:
        """Fail every connection."""
        self._peers.close()

    async def _connect(self, address: str) -> UcxConnection:
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdecimal() or len(port) > 5 or int(port) > _MAX_PORT:
            raise PeerLost(f"{address!r} is no pull address")
        return await UcxConnection.connect(self._reactor.connect(host, int(port)), self._key)


class _PullOperation:
    """Counts buffers that UCX holds; `done` waits for zero."""

    def __init__(
        self,
        connection: UcxConnection,
        number: int,
        buffers: Sequence[memoryview],
        extents: Sequence[Extent],
        on_block: OnBlock,
    ) -> None:
        self.done: Outcome[PullResult] = Outcome()
        self._outstanding = 0
        self._stop = STOP_CANCELLED
        self._connection = connection
        self._number = number
        self._buffers = buffers
        self._extents = extents
        self._on_block = on_block
        self._announced: list[tuple[bytes, str]] = []
        # Groups of blocks that have come before earlier ones: first block to number of blocks.
        self._arrived: dict[int, int] = {}
        self._reported = 0
        self._end: wire.PullEnd | None = None
        self._error: TransferError | None = None

    def handle(self, message: wire.ToClient) -> None:
        """As `Operation.handle`."""
        if isinstance(message, wire.Blocks):
            self._post(message)
        elif isinstance(message, wire.PullEnd) and message.num_blocks == len(self._announced):
            self._end = message
        else:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a pull")
        self._check()

    def fail(self, error: TransferError) -> None:
        """As `Operation.fail`."""
        self._error = self._error or error
        self._check()

    async def stop(self) -> None:
        """As `Operation.stop`: the holder sends no more, and what is on its way arrives."""
        self._stop = STOP_DEADLINE
        self._connection.send(wire.Cancel(self._number))
        await self.done.wait(STOP_GRACE_S)

    def _post(self, message: wire.Blocks) -> None:
        first, count = message.first, len(message.headers)
        if first != len(self._announced) or first + count > len(self._buffers) or count != len(message.tiers):
            raise ProtocolViolation("blocks that were not asked for")
        groups = message.groups or [1] * count
        if min(groups, default=0) < 1 or sum(groups) != count:
            raise ProtocolViolation("groups that are not of these blocks")
        targets = self._targets(first, groups)
        self._announced.extend(zip(message.headers, message.tiers, strict=True))
        for offset, (size, target) in enumerate(zip(groups, targets, strict=True)):
            self._outstanding += 1
            self._connection.endpoint.tag_recv(target, message.tag + offset, partial(self._received, first, size))
            first += size
        if message.stop is not None:
            self._end = wire.PullEnd(message.op, len(self._announced), message.stop)

    def _targets(self, first: int, groups: Sequence[int]) -> list[memoryview]:
        """The memory that each group of blocks is received into."""
        targets: list[memoryview] = []
        for size in groups:
            try:
                targets.append(self._buffers[first] if size == 1 else span(self._extents[first : first + size]))
            except ValueError as error:
                raise ProtocolViolation(str(error)) from None
            first += size
        return targets

    def _received(self, first: int, size: int, error: PeerLost | None) -> None:
        self._outstanding -= 1
        if error is not None:
            self._connection.fail(error)
            self.fail(error)
            return
        self._connection.heard()
        self._arrived[first] = size
        while (size := self._arrived.pop(self._reported, 0)) != 0:
            for index in range(self._reported, self._reported + size):
                self._on_block(index, *self._announced[index])
            self._reported += size
        self._check()

    def _check(self) -> None:
        if self._outstanding or self.done.done():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        elif self._end is not None:
            stop = self._stop if self._end.stop == STOP_CANCELLED else self._end.stop
            self.done.set_result(PullResult(self._end.num_blocks, stop, UcxTransport.name))


class _PushOperation:
    """An offer, then the payloads of what was accepted, then the answer."""

    def __init__(self, connection: UcxConnection, payloads: Sequence[memoryview]) -> None:
        self.done: Outcome[PushResult] = Outcome()
        self._outstanding = 0
        self._connection = connection
        self._payloads = payloads
        self._accepted: int | None = None
        self._end: wire.PushEnd | None = None
        self._error: TransferError | None = None

    def handle(self, message: wire.ToClient) -> None:
        """As `Operation.handle`."""
        if isinstance(message, wire.Accept) and self._accepted is None:
            if message.first < 0 or message.num_blocks < 0:
                raise ProtocolViolation("fewer than no blocks accepted")
            self._accepted = message.first + message.num_blocks
            if self._accepted > len(self._payloads):
                raise ProtocolViolation("more blocks accepted than offered")
            for offset, payload in enumerate(self._payloads[message.first : self._accepted]):
                self._outstanding += 1
                self._connection.endpoint.tag_send(payload, message.tag + offset, self._sent)
        elif isinstance(message, wire.PushEnd) and 0 <= message.accepted <= (self._accepted or 0):
            self._end = message
        else:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a push")
        self._check()

    def fail(self, error: TransferError) -> None:
        """As `Operation.fail`."""
        self._error = self._error or error
        self._check()

    async def stop(self) -> None:
        """As `Operation.stop`: nothing but closing the connection ends what is being sent."""

    def _sent(self, error: PeerLost | None) -> None:
        self._outstanding -= 1
        if error is not None:
            self._connection.fail(error)
            self.fail(error)
        self._check()

    def _check(self) -> None:
        if self._outstanding or self.done.done():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        elif self._end is not None:
            rejected = len(self._payloads) - self._end.accepted
            self.done.set_result(PushResult(self._end.accepted, rejected, UcxTransport.name))
