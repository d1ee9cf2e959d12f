"""The serving side of the UCX transport: lends a source's blocks to pullers and fills a sink's buffers from pushers.

Memory is given back only when UCX is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferTimeout
from services.common.transfer.protocol import (
    STOP_CANCELLED,
    STOP_DEADLINE,
    STOP_GRACE_S,
    BlockLease,
    BlockSink,
    BlockSource,
    HeldBlock,
    PullRequest,
)
from services.common.transfer.server import ServedPull, Session, TransferServer
from services.common.transfer.settle import uninterrupted
from services.common.transfer.ucx_connection import UcxConnection
from services.common.transfer.ucx_groups import group_sizes, run_starts, span
from services.common.transfer.ucx_reactor import OnDone, UcxEndpoint, UcxReactor

# Blocks announced at once; payload of one pull in flight, which also bounds how long a heartbeat queues behind it.
BATCH_BLOCKS = 8
WINDOW_BYTES = 16 * 2**20


class UcxServer(TransferServer[UcxConnection]):
    """TransferServer over UCX."""

    def __init__(
        self, reactor: UcxReactor, key: bytes, source: BlockSource, sink: BlockSink, *, max_operation_s: float
    ) -> None:
        super().__init__(key, source, sink, max_operation_s=max_operation_s)
        self._reactor = reactor

    def start(self, port: int) -> int:
        """Listen; returns the port. Raises RuntimeError when it is taken."""
        return self._reactor.listen(port, self._connected)

    def _connected(self, endpoint: UcxEndpoint) -> None:
        if self._has_room():
            self._accept(UcxConnection.accept(endpoint, self._key))
        else:
            endpoint.close()

    def _served_pull(
        self, session: Session[UcxConnection], message: wire.Pull, request: PullRequest
    ) -> ServedPull[UcxConnection]:
        return _ServedPull(session, message, request)

    async def _serve_push(self, connection: UcxConnection, message: wire.Offer | wire.ShownOffer) -> None:
        if not isinstance(message, wire.Offer):
            raise ProtocolViolation("an offer of memory that is not shown")
        deadline_s = wire.bounded_s(message.deadline_s, self._max_operation_s)
        reservation = await self._sink.reserve(message.headers, message.epoch)
        buffers = reservation.buffers
        tag = connection.take_receive_tags(len(buffers)) if buffers else 0
        receiving = InFlight(connection)
        for offset, buffer in enumerate(buffers):
            connection.endpoint.tag_recv(buffer, tag + offset, receiving.begin(len(buffer)))
        connection.send(wire.Accept(message.op, reservation.num_held, len(buffers), tag))
        try:
            await receiving.settle(deadline_s)
        except BaseException:
            reservation.abandon()
            raise
        accepted = await reservation.commit()
        connection.send(wire.PushEnd(message.op, accepted))


class _ServedPull(ServedPull[UcxConnection]):
    """Announces batches of blocks and sends them, WINDOW_BYTES at a time."""

    def __init__(self, session: Session[UcxConnection], message: wire.Pull, request: PullRequest) -> None:
        super().__init__(session, message.op, request)
        self._run_starts = run_starts(message.runs, len(request.ids))
        self._sending = InFlight(session.connection)
        self._num_sent = 0

    @property
    def _num_answered(self) -> int:
        return self._num_sent

    async def _answer(self, lease: BlockLease) -> bool:
        first, stop = self._num_sent, STOP_CANCELLED
        final = self._final_stop(lease)
        try:
            stop = await self._send_all(lease, first, final)
            is_over = final is not None or stop != lease.stop
            # Sent before the payloads have gone, for which the puller waits by itself; the last blocks carry it.
            if is_over and (not lease.blocks or self._num_sent - first < len(lease.blocks)):
                self._connection.send(wire.PullEnd(self._number, self._num_sent, stop))
        finally:
            try:
                await self._sending.settle(self._left_s())
            finally:
                lease.release(self._num_sent - first, stop)
        return is_over

    async def _send_all(self, lease: BlockLease, first: int, final: str | None) -> str:
        """Send the blocks, numbers `first` on of the pull; why no more of them came."""
        blocks = lease.blocks
        while self._num_sent - first < len(blocks):
            if self._connection.error is not None:
                raise PeerLost(str(self._connection.error))
            if self._cancelled:
                return STOP_CANCELLED
            if self._left_s() <= 0:
                return STOP_DEADLINE
            begin = self._num_sent - first
            room = (WINDOW_BYTES - self._sending.num_bytes) // len(blocks[begin].payload)
            if room > 0 or not self._sending.count:
                end = min(len(blocks), begin + min(BATCH_BLOCKS, max(1, room)))
                self._send(blocks[begin:end], final if end == len(blocks) else None)
            else:
                await self._sending.fewer(self._left_s())
        return lease.stop

    def _send(self, batch: Sequence[HeldBlock], stop: str | None) -> None:
        endpoint = self._connection.endpoint
        extents = [endpoint.extent(block.payload) for block in batch]
        groups = group_sizes(extents, self._num_sent, self._run_starts)
        tag = self._connection.take_send_tags(len(groups))
        headers, tiers = [block.header for block in batch], [block.tier for block in batch]
        self._connection.send(wire.Blocks(self._number, self._num_sent, tag, headers, tiers, stop, groups))
        first = 0
        for offset, size in enumerate(groups):
            payload = batch[first].payload if size == 1 else span(extents[first : first + size])
            endpoint.tag_send(payload, tag + offset, self._sending.begin(len(payload)))
            first += size
        self._num_sent += len(batch)


class InFlight:
    """Buffers of one operation that UCX holds."""

    def __init__(self, connection: UcxConnection) -> None:
        self.count = 0
        self.num_bytes = 0
        self._connection = connection
        self._error: PeerLost | None = None
        self._waiting: asyncio.Future[None] | None = None

    def begin(self, num_bytes: int) -> OnDone:
        """A buffer is being posted; returns what to call when UCX is done with it."""
        self.count += 1
        self.num_bytes += num_bytes
        return partial(self._done, num_bytes)

    async def fewer(self, timeout_s: float) -> None:
        """Wait until UCX is done with one more, or for `timeout_s`."""
        self._waiting = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._waiting,), timeout=timeout_s)

    async def settle(self, timeout_s: float) -> None:
        """Wait for all; after `timeout_s` and a grace close the connection, and wait until UCX is done.

        Raises TransferError when one of them failed.
        """
        if self.count:
            await uninterrupted(self._settle(max(0.0, timeout_s) + STOP_GRACE_S))
        if self._error is not None:
            raise self._error

    async def _settle(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self.count:
            left_s = until_s - loop.time()
            if left_s <= 0:
                self._connection.fail(TransferTimeout("the peer did not take its blocks in time"))
                left_s = STOP_GRACE_S
            await self.fewer(left_s)

    def _done(self, num_bytes: int, error: PeerLost | None) -> None:
        self.count -= 1
        self.num_bytes -= num_bytes
        if error is None:
            self._connection.heard()
        else:
            self._error = self._error or error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
