"""The serving side of the shared-memory transport: tells pullers where leased blocks lie, and copies pushed ones in.

A lease ends when the puller has taken everything, with the connection, or at the pull's deadline; so many bytes are
lent ahead of what was taken that neither side waits, and a slow puller holds no more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import structlog

from services.common.transfer import wire
from services.common.transfer.errors import PeerLost, ProtocolViolation, TransferTimeout
from services.common.transfer.protocol import (
    STOP_CANCELLED,
    STOP_DEADLINE,
    STOP_ELSEWHERE,
    BlockLease,
    BlockSink,
    BlockSource,
    HeldBlock,
    PullRequest,
)
from services.common.transfer.server import ServedPull, Session, TransferServer
from services.common.transfer.shm_client import TELL_BYTES, WINDOW_BYTES
from services.common.transfer.shm_connection import ShmConnection, listen
from services.common.transfer.shm_directory import ShownDirectory
from services.common.transfer.shm_reads import TURN_BYTES
from services.common.transfer.shm_regions import Region, locate

# Blocks, and about how many bytes, lent with one message.
BATCH_BLOCKS = 32
BATCH_BYTES = 2 * TELL_BYTES
BATCH_HEADER_BYTES = wire.MAX_CONTROL_BYTES // 2
_log = structlog.get_logger()


class ShmServer(TransferServer[ShmConnection]):
    """TransferServer over Unix sockets; shows `regions`."""

    same_host = True

    def __init__(
        self,
        key: bytes,
        source: BlockSource,
        sink: BlockSink,
        regions: Sequence[Region],
        *,
        max_operation_s: float,
        directory: ShownDirectory | None = None,
    ) -> None:
        super().__init__(key, source, sink, max_operation_s=max_operation_s)
        self._regions = regions
        self._directory = directory
        self._listener: socket.socket | None = None

    def start(self, address: str) -> None:
        """Listen for peers that know this process by `address`. Raises OSError."""
        self._listener = listen(self._key, address)
        asyncio.get_running_loop().add_reader(self._listener, self._connected)

    async def close(self) -> None:
        """As `TransferServer.close`."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await super().close()

    def _connected(self) -> None:
        assert self._listener is not None
        try:
            endpoint, _ = self._listener.accept()
        except OSError:
            return
        if self._has_room():
            shown = self._directory.region if self._directory else None
            self._accept(ShmConnection.accept(endpoint, self._key, self._regions, shown))
        else:
            endpoint.close()

    def note_read(self, request: PullRequest, duration_s: float) -> None:
        """As `TransferServer.note_read`."""
        if self._directory is None:
            super().note_read(request, duration_s)
        else:
            self._directory.was_read(request, duration_s)

    def _served_pull(
        self, session: Session[ShmConnection], message: wire.Pull, request: PullRequest
    ) -> ServedPull[ShmConnection]:
        return _ServedPull(session, message.op, request, self._regions)

    async def _serve_push(self, connection: ShmConnection, message: wire.Offer | wire.ShownOffer) -> None:
        if not isinstance(message, wire.ShownOffer) or len(message.places) != len(message.headers):
            raise ProtocolViolation("an offer without places")
        deadline_s = wire.bounded_s(message.deadline_s, self._max_operation_s)
        reservation = await self._sink.reserve(message.headers, message.epoch)
        until_s = asyncio.get_running_loop().time() + deadline_s
        try:
            await _copy_in(connection, message.places[reservation.num_held :], reservation.buffers, until_s)
        except BaseException:
            reservation.abandon()
            raise
        connection.send(wire.PushEnd(message.op, await reservation.commit()))


async def _copy_in(
    connection: ShmConnection, places: Sequence[wire.Place], buffers: Sequence[memoryview], until_s: float
) -> None:
    """Copy pushed blocks from the pusher's memory, with a turn of the loop in between."""
    copied = 0
    for buffer, place in zip(buffers, places, strict=False):
        if connection.error is not None:
            raise PeerLost(str(connection.error))
        if asyncio.get_running_loop().time() >= until_s:
            raise TransferTimeout("the push's deadline passed")
        if len(buffer) != place[2]:
            raise ProtocolViolation("a payload of another size than its header's")
        buffer[:] = connection.peer_view(place)
        copied += len(buffer)
        if copied >= TURN_BYTES:
            copied = 0
            await asyncio.sleep(0)


class _ServedPull(ServedPull[ShmConnection]):
    """Lends batches ahead of what the puller has taken."""

    def __init__(
        self, session: Session[ShmConnection], number: int, request: PullRequest, regions: Sequence[Region]
    ) -> None:
        super().__init__(session, number, request)
        self._regions = regions
        # Of the present lease; the first of them is number `_first` of the pull.
        self._blocks: Sequence[HeldBlock] = ()
        self._first = 0
        self._num_lent = 0
        self._num_taken = 0
        self._untaken_bytes = 0
        self._progress = asyncio.Event()

    @property
    def _num_answered(self) -> int:
        return self._num_lent

    def wake(self) -> None:
        """As `ServedPull.wake`."""
        super().wake()
        self._progress.set()

    def handle(self, message: wire.Cancel | wire.Taken) -> None:
        """As `ServedPull.handle`."""
        if isinstance(message, wire.Cancel):
            super().handle(message)
            return
        if not self._num_taken < message.num_blocks <= self._num_lent:
            raise ProtocolViolation("blocks taken that were not lent")
        taken = self._blocks[self._num_taken - self._first : message.num_blocks - self._first]
        self._untaken_bytes -= sum(len(block.payload) for block in taken)
        self._num_taken = message.num_blocks
        self._progress.set()

    async def _answer(self, lease: BlockLease) -> bool:
        self._blocks, self._first = lease.blocks, self._num_lent
        stop, said = STOP_CANCELLED, False
        try:
            stop, said = await self._lend_all(lease)
        finally:
            self._blocks = ()
            lease.release(self._num_taken - self._first, stop)
        if stop == lease.stop and self._final_stop(lease) is None:
            return False
        if not said:
            self._connection.send(wire.PullEnd(self._number, self._num_lent, stop))
        return True

    async def _lend_all(self, lease: BlockLease) -> tuple[str, bool]:
        """Why no more was lent, and whether the puller knows. Returns when all of it was taken, or time is up."""
        stop: str | None = None
        while True:
            # Before anything is looked at: lending itself may find the connection broken, and wake us.
            self._progress.clear()
            if self._connection.error is not None:
                raise PeerLost(str(self._connection.error))
            if self._cancelled or self._left_s() <= 0:
                return STOP_CANCELLED if self._cancelled else STOP_DEADLINE, False
            while stop is None and self._untaken_bytes < WINDOW_BYTES:
                stop = self._lend_batch(lease)
            if self._num_taken == self._num_lent and stop is not None:
                return stop, bool(self._num_lent)
            try:
                async with asyncio.timeout(self._left_s()):
                    await self._progress.wait()
            except TimeoutError:
                continue

    def _lend_batch(self, lease: BlockLease) -> str | None:
        """Lend some blocks; returns why they are the last, None when they are not."""
        first = self._num_lent - self._first
        most = max(1, BATCH_BYTES // max(1, len(lease.blocks[first].payload))) if first < len(lease.blocks) else 1
        batch = lease.blocks[first : first + min(BATCH_BLOCKS, most)]
        num_wanted = len(batch)
        places: list[wire.Place] = []
        header_bytes = 0
        for block in batch:
            header_bytes += len(block.header)
            if header_bytes > BATCH_HEADER_BYTES and places:
                num_wanted = len(places)
                break
            if (found := locate(self._regions, block.payload)) is None:
                break
            places.append((*found, len(block.payload)))
        batch = batch[: len(places)]
        end = first + len(batch)
        stop = lease.stop if end == len(lease.blocks) else None
        said = self._final_stop(lease) if stop is not None else None
        if len(places) < num_wanted:
            stop = said = STOP_ELSEWHERE
        if batch:
            headers, tiers = [block.header for block in batch], [block.tier for block in batch]
            number = self._num_lent
            self._connection.send(wire.Lent(self._number, number, headers, tiers, places, self._lease_s, said))
            self._num_lent += len(batch)
            self._untaken_bytes += sum(len(block.payload) for block in batch)
        elif self._num_lent and stop is not None:
            self._connection.send(wire.PullEnd(self._number, self._num_lent, stop))
        return stop
