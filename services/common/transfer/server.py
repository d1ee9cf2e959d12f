"""What the servers of UCX and of shared memory have in common: connections, sessions, operations as bounded tasks.

Every operation is a task with a deadline. A lease is released, and a reservation committed or abandoned, only when
nothing uses its memory any more.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Generic, TypeVar

import structlog

from services.common.transfer import wire
from services.common.transfer.connection import Connection
from services.common.transfer.errors import HandshakeRefused, PeerLost, ProtocolViolation, TransferError
from services.common.transfer.protocol import (
    MAX_PUSH_BLOCKS,
    STOP_CANCELLED,
    STOP_DEADLINE,
    STOP_MISSING,
    STOP_OVERLOAD,
    BlockLease,
    BlockSink,
    BlockSource,
    PullRequest,
)

MAX_CONNECTIONS = 1024
MAX_OPERATIONS = 512
_log = structlog.get_logger()
C = TypeVar("C", bound=Connection)


class TransferServer(ABC, Generic[C]):
    """Serves `source` and `sink` to whoever proves the mesh secret. `max_operation_s` bounds every lease."""

    # Whether peers are on this host for certain.
    same_host = False

    def __init__(self, key: bytes, source: BlockSource, sink: BlockSink, *, max_operation_s: float) -> None:
        self._key = key
        self._source = source
        self._sink = sink
        self._max_operation_s = max_operation_s
        self._connections: set[C] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_operations = 0
        self._num_handshakes = 0
        self._closing = False

    @abstractmethod
    def _served_pull(self, session: Session[C], message: wire.Pull, request: PullRequest) -> ServedPull[C]:
        """How a pull is answered here."""

    @abstractmethod
    async def _serve_push(self, connection: C, message: wire.Offer | wire.ShownOffer) -> None:
        """Take in what is offered. Raises TransferError."""

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

    def _has_room(self) -> bool:
        """Whether another connection may begin its handshake."""
        if not self._closing and len(self._connections) + self._num_handshakes < MAX_CONNECTIONS:
            return True
        _log.warning("a transfer connection was turned away", connections=len(self._connections))
        return False

    def _accept(self, handshake: Coroutine[Any, Any, C]) -> None:
        self._spawn(self._open_session(handshake))

    async def _open_session(self, handshake: Coroutine[Any, Any, C]) -> None:
        self._num_handshakes += 1
        try:
            connection = await handshake
        except HandshakeRefused as error:
            _log.warning("a transfer handshake was refused", detail=str(error))
            return
        except TransferError:
            return
        finally:
            self._num_handshakes -= 1
        self._connections.add(connection)
        Session(self, connection)

    def forget(self, connection: C) -> None:
        """`connection` has failed."""
        self._connections.discard(connection)

    def spawn_pull(self, session: Session[C], message: wire.Pull) -> None:
        """Serve a pull in a task of its own. Raises ProtocolViolation."""
        if message.op in session.pulls:
            raise ProtocolViolation("two pulls of one number")
        request = replace(message.request(self._max_operation_s), same_host=self.same_host)
        if self._closing or self._num_operations >= MAX_OPERATIONS:
            session.connection.send(wire.PullEnd(message.op, 0, STOP_OVERLOAD))
            return
        pull = session.pulls[message.op] = self._served_pull(session, message, request)
        self._operate(session.connection, pull.run(self._source, self._max_operation_s))

    def spawn_push(self, session: Session[C], message: wire.Offer | wire.ShownOffer) -> None:
        """Serve a push in a task of its own."""
        if not 0 < len(message.headers) <= MAX_PUSH_BLOCKS:
            raise ProtocolViolation("a push of no or of too many blocks")
        if self._closing or self._num_operations >= MAX_OPERATIONS:
            session.connection.send(wire.PushEnd(message.op, 0))
            return
        self._operate(session.connection, self._serve_push(session.connection, message))

    def note_read(self, request: PullRequest, duration_s: float) -> None:
        """A peer has read blocks by itself. Raises ProtocolViolation where there is nothing to be read."""
        raise ProtocolViolation("blocks read that were not shown")

    def _operate(self, connection: C, work: Coroutine[Any, Any, None]) -> None:
        # Counted at once: one packet may ask for many.
        self._num_operations += 1
        connection.begin()
        self._spawn(self._operation(connection, work))

    async def _operation(self, connection: C, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TransferError as error:
            _log.warning("a served transfer failed", detail=str(error))
            if isinstance(error, ProtocolViolation):
                connection.fail(error)
        finally:
            connection.end()
            self._num_operations -= 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("serving a transfer failed", exc_info=error)


class Session(Generic[C]):
    """Messages of one connection, and its running pulls."""

    def __init__(self, server: TransferServer[C], connection: C) -> None:
        self.connection = connection
        self.pulls: dict[int, ServedPull[C]] = {}
        self._server = server
        connection.on_message = self._dispatch
        connection.on_failed = self._failed
        connection.start()
        if connection.error is not None:
            server.forget(connection)

    def _failed(self, _: TransferError) -> None:
        self._server.forget(self.connection)
        for pull in self.pulls.values():
            pull.wake()

    def _dispatch(self, message: wire.AnyControl) -> None:
        if isinstance(message, wire.Pull):
            self._server.spawn_pull(self, message)
        elif isinstance(message, wire.Offer | wire.ShownOffer):
            self._server.spawn_push(self, message)
        elif isinstance(message, wire.WasRead):
            self._server.note_read(message.request(), message.took_s)
        elif isinstance(message, wire.Cancel | wire.Taken):
            if message.op in self.pulls:
                self.pulls[message.op].handle(message)
        else:
            raise ProtocolViolation(f"{type(message).__name__} from a client")


class ServedPull(ABC, Generic[C]):
    """One pull being answered: with one lease, or where blocks are waited for with one lease after the other."""

    def __init__(self, session: Session[C], number: int, request: PullRequest) -> None:
        self._session = session
        self._connection = session.connection
        self._number = number
        self._request = request
        self._began_s = asyncio.get_running_loop().time()
        self._end_s = self._began_s + request.deadline_s
        # When the present lease ends.
        self._until_s = self._end_s
        self._cancelled = False
        self._leasing: asyncio.Timeout | None = None

    def wake(self) -> None:
        """The connection has failed or the pull was cancelled: whatever waits looks again."""
        if self._leasing is not None and not self._leasing.expired():
            self._leasing.reschedule(0.0)

    @property
    @abstractmethod
    def _num_answered(self) -> int:
        """Blocks handed out by all leases so far."""

    @abstractmethod
    async def _answer(self, lease: BlockLease) -> bool:
        """Hand out the blocks and release the lease; whether the pull is over, which has been said then.

        Raises TransferError.
        """

    def handle(self, message: wire.Cancel | wire.Taken) -> None:
        """A message from the puller. Raises ProtocolViolation."""
        if not isinstance(message, wire.Cancel):
            raise ProtocolViolation(f"unexpected {type(message).__name__}")
        self._cancelled = True
        self.wake()

    async def run(self, source: BlockSource, max_lease_s: float) -> None:
        """From the first lease to the release of the last."""
        loop = asyncio.get_running_loop()
        try:
            is_over = False
            while not is_over:
                lease = await self._lease(source, self._end_s - loop.time())
                self._until_s = min(self._end_s, loop.time() + max_lease_s)
                is_over = lease is None or await self._answer(lease)
        finally:
            del self._session.pulls[self._number]

    async def _lease(self, source: BlockSource, timeout_s: float) -> BlockLease | None:
        """The blocks after those that were handed out; None when the pull is over, which has been said then."""
        request = replace(self._request, ids=self._request.ids[self._num_answered :])
        try:
            async with asyncio.timeout(timeout_s) as self._leasing:
                return await source.lease(request)
        except TimeoutError:
            stop = STOP_CANCELLED if self._cancelled else STOP_DEADLINE
        finally:
            self._leasing = None
        self._connection.send(wire.PullEnd(self._number, self._num_answered, stop))
        return None

    def _final_stop(self, lease: BlockLease) -> str | None:
        """Why nothing follows the blocks of `lease`; None when more are waited for."""
        waits = self._request.wait_s > 0 and lease.stop == STOP_MISSING and lease.blocks
        return None if waits else lease.stop

    @property
    def _lease_s(self) -> float:
        """How long after the pull was asked for the present lease ends."""
        return self._until_s - self._began_s

    def _left_s(self) -> float:
        return self._until_s - asyncio.get_running_loop().time()
