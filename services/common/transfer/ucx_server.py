"""The serving side of the UCX transport: lends a source's blocks to pullers and fills a sink's buffers from pushers.

Every operation is a task with a deadline. A lease is released, and a reservation committed or abandoned, only when UCX
is done with its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import structlog

from services.common.blocks import split_ids
from services.common.transfer import wire
from services.common.transfer.errors import (
    HandshakeRefused,
    PeerLost,
    ProtocolViolation,
    TransferError,
    TransferTimeout,
)
from services.common.transfer.protocol import (
    MAX_PULL_BLOCKS,
    MAX_PUSH_BLOCKS,
    STOP_CANCELLED,
    STOP_DEADLINE,
    STOP_GRACE_S,
    STOP_OVERLOAD,
    BlockLease,
    BlockSink,
    BlockSource,
    HeldBlock,
    PullRequest,
)
from services.common.transfer.settle import uninterrupted
from services.common.transfer.ucx_connection import UcxConnection
from services.common.transfer.ucx_reactor import Completed, UcxEndpoint, UcxReactor

# Blocks announced at once; payload of one pull in flight, which also bounds how long a heartbeat queues behind it.
BATCH_BLOCKS = 8
WINDOW_BYTES = 16 * 2**20
MAX_CONNECTIONS = 1024
MAX_OPERATIONS = 512
_log = structlog.get_logger()


class UcxServer:
    """Serves `source` and `sink` to whoever proves the mesh secret. `max_operation_s` bounds every lease."""

    def __init__(
        self, reactor: UcxReactor, key: bytes, source: BlockSource, sink: BlockSink, *, max_operation_s: float
    ) -> None:
        self._reactor = reactor
        self._key = key
        self._source = source
        self._sink = sink
        self._max_operation_s = max_operation_s
        self._connections: set[UcxConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_operations = 0
        self._num_handshakes = 0
        self._closing = False

    def start(self, port: int) -> int:
        """Listen; returns the port. Raises RuntimeError when it is taken."""
        return self._reactor.listen(port, self._accept)

    async def drain(self, timeout_s: float) -> None:
        """Take no new operations and let running ones finish."""
        self._closing = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Fail every connection and wait until no memory is in use."""
        self._closing = True
        for connection in list(self._connections):
            connection.fail(PeerLost("closing"))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._max_operation_s)

    def _accept(self, endpoint: UcxEndpoint) -> None:
        if self._closing or len(self._connections) + self._num_handshakes >= MAX_CONNECTIONS:
            _log.warning("a transfer connection was turned away", connections=len(self._connections))
            endpoint.close()
            return
        self._spawn(self._handshake(endpoint))

    async def _handshake(self, endpoint: UcxEndpoint) -> None:
        self._num_handshakes += 1
        try:
            connection = await UcxConnection.accept(endpoint, self._key)
        except HandshakeRefused as error:
            _log.warning("a transfer handshake was refused", detail=str(error))
            return
        except TransferError:
            return
        finally:
            self._num_handshakes -= 1
        self._connections.add(connection)
        _Session(self, connection)

    def forget(self, connection: UcxConnection) -> None:
        """`connection` has failed."""
        self._connections.discard(connection)

    def spawn_pull(self, session: _Session, message: wire.Pull) -> None:
        """Serve a pull in a task of its own."""
        ids = split_ids(message.ids) if len(message.ids) <= MAX_PULL_BLOCKS * 16 and len(message.ids) % 16 == 0 else []
        if not ids:
            raise ProtocolViolation("a pull of no or of too many blocks")
        deadline_s = min(message.deadline_s, self._max_operation_s)
        request = PullRequest(ids, message.epoch, deadline_s, message.traceparent, message.request_id)
        if self._closing or self._num_operations >= MAX_OPERATIONS:
            session.connection.send(wire.PullEnd(message.op, 0, STOP_OVERLOAD))
            return
        self._spawn(self._operation(session.connection, _ServedPull(session, message.op, request).run(self._source)))

    def spawn_push(self, session: _Session, message: wire.Offer) -> None:
        """Serve a push in a task of its own."""
        if not 0 < len(message.headers) <= MAX_PUSH_BLOCKS:
            raise ProtocolViolation("a push of no or of too many blocks")
        if self._closing or self._num_operations >= MAX_OPERATIONS:
            session.connection.send(wire.PushEnd(message.op, 0))
            return
        self._spawn(self._operation(session.connection, self._serve_push(session.connection, message)))

    async def _operation(self, connection: UcxConnection, work: Coroutine[Any, Any, None]) -> None:
        self._num_operations += 1
        connection.begin()
        try:
            await work
        except TransferError as error:
            _log.warning("a served transfer failed", detail=str(error))
        finally:
            connection.end()
            self._num_operations -= 1

    async def _serve_push(self, connection: UcxConnection, message: wire.Offer) -> None:
        deadline_s = min(message.deadline_s, self._max_operation_s)
        reservation = await self._sink.reserve(message.headers, message.epoch)
        buffers = reservation.buffers
        tag = connection.take_receive_tags(len(buffers)) if buffers else 0
        receiving = [connection.endpoint.tag_recv(buffer, tag + i) for i, buffer in enumerate(buffers)]
        connection.send(wire.Accept(message.op, reservation.num_held, len(buffers), tag))
        try:
            await settle(connection, receiving, deadline_s)
        except BaseException:
            reservation.abandon()
            raise
        accepted = await reservation.commit()
        connection.send(wire.PushEnd(message.op, accepted))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("serving a transfer failed", exc_info=error)


class _Session:
    """Messages of one connection, and which of its pulls have been cancelled."""

    def __init__(self, server: UcxServer, connection: UcxConnection) -> None:
        self.connection = connection
        self.pulls: dict[int, _ServedPull] = {}
        self._server = server
        connection.on_message = self._dispatch
        connection.on_failed = self._failed
        connection.start()
        if connection.error is not None:
            server.forget(connection)

    def _failed(self, _: TransferError) -> None:
        self._server.forget(self.connection)

    def _dispatch(self, message: wire.AnyControl) -> None:
        if isinstance(message, wire.Pull):
            self._server.spawn_pull(self, message)
        elif isinstance(message, wire.Offer):
            self._server.spawn_push(self, message)
        elif isinstance(message, wire.Cancel):
            if message.op in self.pulls:
                self.pulls[message.op].cancelled = True
        else:
            raise ProtocolViolation(f"{type(message).__name__} from a client")


class _ServedPull:
    """One pull being answered."""

    def __init__(self, session: _Session, number: int, request: PullRequest) -> None:
        self.cancelled = False
        self._session = session
        self._connection = session.connection
        self._number = number
        self._request = request
        self._until_s = asyncio.get_running_loop().time() + request.deadline_s
        self._sending: set[Completed] = set()
        self._sending_bytes = 0
        self._num_sent = 0

    async def run(self, source: BlockSource) -> None:
        self._session.pulls[self._number] = self
        try:
            await self._answer(source)
        finally:
            del self._session.pulls[self._number]

    async def _answer(self, source: BlockSource) -> None:
        try:
            async with asyncio.timeout(self._request.deadline_s):
                lease = await source.lease(self._request)
        except TimeoutError:
            self._connection.send(wire.PullEnd(self._number, 0, STOP_DEADLINE))
            return
        stop = STOP_CANCELLED
        try:
            stop = await self._send_all(lease)
            # Sent before the payloads have gone, for which the puller waits by itself; the last blocks carry it.
            if self._num_sent == 0 or self._num_sent < len(lease.blocks):
                self._connection.send(wire.PullEnd(self._number, self._num_sent, stop))
        finally:
            try:
                await settle(self._connection, list(self._sending), self._left_s())
            finally:
                lease.release(self._num_sent, stop)

    async def _send_all(self, lease: BlockLease) -> str:
        blocks = lease.blocks
        while self._num_sent < len(blocks):
            if self._connection.error is not None:
                raise PeerLost(str(self._connection.error))
            if self.cancelled:
                return STOP_CANCELLED
            if self._left_s() <= 0:
                return STOP_DEADLINE
            room = (WINDOW_BYTES - self._sending_bytes) // len(blocks[self._num_sent].payload)
            if room > 0 or not self._sending:
                end = min(len(blocks), self._num_sent + min(BATCH_BLOCKS, max(1, room)))
                self._send(blocks[self._num_sent : end], lease.stop if end == len(blocks) else None)
            else:
                await asyncio.wait(self._sending, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
        return lease.stop

    def _send(self, batch: Sequence[HeldBlock], stop: str | None) -> None:
        tag = self._connection.take_send_tags(len(batch))
        headers, tiers = [block.header for block in batch], [block.tier for block in batch]
        self._connection.send(wire.Blocks(self._number, self._num_sent, tag, headers, tiers, stop))
        for offset, block in enumerate(batch):
            future = self._connection.endpoint.tag_send(block.payload, tag + offset)
            self._sending.add(future)
            self._sending_bytes += len(block.payload)
            future.add_done_callback(partial(self._sent, len(block.payload)))
        self._num_sent += len(batch)

    def _sent(self, num_bytes: int, future: Completed) -> None:
        self._sending.discard(future)
        self._sending_bytes -= num_bytes
        if future.exception() is None:
            self._connection.heard()

    def _left_s(self) -> float:
        return self._until_s - asyncio.get_running_loop().time()


async def settle(connection: UcxConnection, futures: list[Completed], timeout_s: float) -> None:
    """Wait for all; after `timeout_s` and a grace close the connection, and wait until UCX is done with the memory.

    Raises TransferError when one of them failed.
    """
    await uninterrupted(_settle(connection, futures, timeout_s))


async def _settle(connection: UcxConnection, futures: list[Completed], timeout_s: float) -> None:
    if not futures:
        return
    _, pending = await asyncio.wait(futures, timeout=max(0.0, timeout_s) + STOP_GRACE_S)
    if pending:
        connection.fail(TransferTimeout("the peer did not take its blocks in time"))
        await asyncio.wait(futures)
    for future in futures:
        if (error := future.exception()) is not None:
            raise PeerLost(str(error))
