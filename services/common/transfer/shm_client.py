"""The client's side of the shared-memory transport: blocks are copied out of the holder's memory by the puller.

What the holder's directory lists is read without asking. The rest is asked for: the holder says where leased blocks
lie, and nothing else of them passes through the socket. What counts is the copy, which callers verify: should the
holder's lease have ended meanwhile the blocks are not reported, and a holder that changes them all the same is found
by the checksum. Copies are made on the event loop, a turn's worth at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.transfer import wire
from services.common.transfer.client import Outcome, Peer, PeerCache
from services.common.transfer.errors import ProtocolViolation, TransferError, TransferTimeout
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_DEADLINE,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
)
from services.common.transfer.shm_connection import NotShown, ShmConnection
from services.common.transfer.shm_reads import TURN_BYTES, read_listed
from services.common.transfer.shm_regions import Region, locate

# The holder, which lends WINDOW_BYTES ahead, is told each time that so much has been taken.
TELL_BYTES = 8 * 2**20
WINDOW_BYTES = 4 * TELL_BYTES


@dataclass(frozen=True, slots=True)
class ShmStatistics:
    """Blocks pulled since start: read by the holder's directory, and lent by it when it was asked."""

    read_blocks: int
    lent_blocks: int


class ShmTransport:
    """Transport over shared memory. Raises NotHere for peers that are not on this host."""

    name = "shm"

    def __init__(self, key: bytes, regions: Sequence[Region], *, ask_always: bool = False) -> None:
        """ask_always: look into no directory."""
        self._key = key
        self._regions = regions
        self._ask_always = ask_always
        self._read_blocks = 0
        self._lent_blocks = 0
        self._peers: PeerCache[ShmConnection] = PeerCache(self._connect)

    def statistics(self) -> ShmStatistics:
        """Totals since start."""
        return ShmStatistics(self._read_blocks, self._lent_blocks)

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`."""
        connected = await self._peers.get(peer.grpc_address, request.deadline_s)
        started_s = asyncio.get_running_loop().time()
        first = 0
        if not self._ask_always:
            first = await read_listed(connected.connection, request, buffers, on_block)
            self._read_blocks += first
        if not first:
            return await self._ask(connected, request, buffers, on_block)
        if first == len(request.ids):
            return PullResult(first, STOP_COMPLETE, self.name)
        left_s = request.deadline_s - (asyncio.get_running_loop().time() - started_s)
        if left_s <= 0:
            return PullResult(first, STOP_DEADLINE, self.name)
        rest = replace(request, ids=request.ids[first:], deadline_s=left_s)
        result = await self._ask(connected, rest, buffers[first:], lambda index, *how: on_block(first + index, *how))
        return replace(result, num_blocks=first + result.num_blocks)

    async def _ask(
        self, connected: Peer[ShmConnection], request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        number = connected.next_number()
        operation = _PullOperation(connected.connection, number, buffers, on_block, tells_all=request.wait_s > 0)
        result = await connected.run(number, operation, wire.Pull.of(number, request), request.deadline_s)
        self._lent_blocks += result.num_blocks
        return result

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`. Raises NotShown when a payload lies in no region."""
        places: list[wire.Place] = []
        for payload in request.payloads:
            if (found := locate(self._regions, payload)) is None:
                raise NotShown("the payload is in no shared region")
            places.append((*found, len(payload)))
        connected = await self._peers.get(peer.grpc_address, request.deadline_s)
        number = connected.next_number()
        operation = _PushOperation(len(places))
        message = wire.ShownOffer(
            number, list(request.headers), places, request.epoch, request.deadline_s, request.traceparent
        )
        return await connected.run(number, operation, message, request.deadline_s)

    async def close(self) -> None:
        """Fail every connection."""
        self._peers.close()

    async def _connect(self, address: str) -> ShmConnection:
        return await ShmConnection.connect(address, self._key, self._regions)


class _PullOperation:
    """Copies what is lent, in order. Between two turns of the loop it holds no memory of either side.

    tells_all: the holder is told whenever everything has been taken, and lends no more before.
    """

    def __init__(
        self,
        connection: ShmConnection,
        number: int,
        buffers: Sequence[memoryview],
        on_block: OnBlock,
        *,
        tells_all: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: Outcome[PullResult] = Outcome()
        self._started_s = self._loop.time()
        self._connection = connection
        self._number = number
        self._buffers = buffers
        self._on_block = on_block
        self._tells_all = tells_all
        self._lent: deque[wire.Lent] = deque()
        self._num_lent = 0
        self._num_copied = 0
        self._untold_bytes = 0
        self._copying = False
        self._end: wire.PullEnd | None = None

    def handle(self, message: wire.ToClient) -> None:
        """As `Operation.handle`."""
        if self.done.done():
            return
        if isinstance(message, wire.Lent):
            self._take_in(message)
            if not self._copying:
                self._copying = True
                self._copy_turn()
        elif isinstance(message, wire.PullEnd) and message.num_blocks == self._num_lent:
            self._end = message
            self._check()
        else:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a pull")

    def fail(self, error: TransferError) -> None:
        """As `Operation.fail`."""
        if not self.done.done():
            self.done.set_exception(error)

    async def stop(self) -> None:
        """As `Operation.stop`: the holder is told, and need not answer."""
        self._connection.send(wire.Cancel(self._number))
        if not self.done.done():
            self.done.set_result(PullResult(self._num_copied, STOP_DEADLINE, ShmTransport.name))

    def _take_in(self, message: wire.Lent) -> None:
        count = len(message.headers)
        if message.first != self._num_lent or not len(message.tiers) == len(message.places) == count > 0:
            raise ProtocolViolation("blocks out of order")
        wanted = self._buffers[message.first : message.first + count]
        if [place[2] for place in message.places] != [len(buffer) for buffer in wanted]:
            raise ProtocolViolation("blocks that were not asked for")
        self._lent.append(message)
        self._num_lent += count
        if message.stop is not None:
            self._end = wire.PullEnd(message.op, self._num_lent, message.stop)

    def _copy_turn(self) -> None:
        left = TURN_BYTES
        while self._lent and not self.done.done() and left > 0:
            left -= self._copy_next(self._lent[0])
        if self._lent and not self.done.done():
            self._loop.call_soon(self._copy_turn)
            return
        self._copying = False
        self._check()

    def _copy_next(self, message: wire.Lent) -> int:
        """Copy one block and report it; returns its size."""
        index = self._num_copied
        position = index - message.first
        buffer = self._buffers[index]
        try:
            buffer[:] = self._connection.peer_view(message.places[position])
        except ProtocolViolation as violation:
            self._connection.fail(violation)
            return len(buffer)
        # Bytes copied while the lease held are the block's.
        if self._loop.time() >= self._started_s + message.lease_s:
            self._connection.send(wire.Cancel(self._number))
            self.fail(TransferTimeout("the holder's lease has ended"))
            return len(buffer)
        self._num_copied += 1
        self._on_block(index, message.headers[position], message.tiers[position])
        self._untold_bytes += len(buffer)
        if position + 1 == len(message.headers):
            self._lent.popleft()
        is_last = self._end is not None and self._num_copied == self._num_lent
        if self._untold_bytes >= TELL_BYTES and not is_last:
            self._untold_bytes = 0
            self._connection.send(wire.Taken(self._number, self._num_copied))
        return len(buffer)

    def _check(self) -> None:
        if self._num_copied < self._num_lent or self.done.done():
            return
        if self._end is None:
            if self._tells_all and self._untold_bytes:
                self._untold_bytes = 0
                self._connection.send(wire.Taken(self._number, self._num_copied))
        else:
            if self._untold_bytes:
                # Nobody waits for this: it goes with the next message.
                self._connection.send_later(wire.Taken(self._number, self._num_copied))
            self.done.set_result(PullResult(self._num_copied, self._end.stop, ShmTransport.name))


class _PushOperation:
    """Waits for the peer, who copies by itself."""

    def __init__(self, num_blocks: int) -> None:
        self.done: Outcome[PushResult] = Outcome()
        self._num_blocks = num_blocks

    def handle(self, message: wire.ToClient) -> None:
        """As `Operation.handle`."""
        if not isinstance(message, wire.PushEnd) or not 0 <= message.accepted <= self._num_blocks:
            raise ProtocolViolation(f"unexpected {type(message).__name__} in a push")
        if not self.done.done():
            rejected = self._num_blocks - message.accepted
            self.done.set_result(PushResult(message.accepted, rejected, ShmTransport.name))

    def fail(self, error: TransferError) -> None:
        """As `Operation.fail`."""
        if not self.done.done():
            self.done.set_exception(error)

    async def stop(self) -> None:
        """As `Operation.stop`: nothing but closing the connection keeps the peer from reading on."""
