"""A connection over a Unix socket to a peer on the same host, over which both sides show their memory read-only.

The socket lies in the abstract namespace of the network namespace, so it needs no file, works between containers that
share a network (a pod) without shared IPC, and goes with its process. Its name comes from the peer's address under
the mesh secret: nobody else can take it beforehand. Who does not share the network finds nothing there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import socket
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

from services.common.transfer import wire
from services.common.transfer.connection import MAX_UNSENT_BYTES, Connection, handshake_message
from services.common.transfer.errors import PeerLost, ProtocolViolation
from services.common.transfer.shm_directory import DirectoryReader
from services.common.transfer.shm_regions import MAX_REGIONS, Region, map_received

_BACKLOG = 128
# How long a message that is in no hurry waits for another one to go with, and how many do.
_LATER_S = 0.005
_MAX_LATER = 64
_WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK)
T = TypeVar("T", bound=wire.Control)


class NotHere(PeerLost):
    """No such peer on this host: take another transport."""


class NotShown(PeerLost):
    """A payload lies in no region: take another transport for it."""


def socket_name(key: bytes, address: str) -> str:
    """Where the holder with this gRPC address listens."""
    return "\0kvmesh-" + hmac.new(key, b"kvmesh shm|" + address.encode(), sha256).hexdigest()[:40]


def listen(key: bytes, address: str) -> socket.socket:
    """A listening socket. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(socket_name(key, address))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class ShmConnection(Connection):
    """Made by `connect` or `accept`. `regions` are this side's, `peer_memory` the other side's."""

    def __init__(self, endpoint: socket.socket, regions: Sequence[Region], directory: Region | None = None) -> None:
        super().__init__()
        self.regions = regions
        self.peer_memory: list[memoryview] = []
        self.peer_directory: DirectoryReader | None = None
        self._directory = directory
        self._socket = endpoint
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(wire.MAX_CONTROL_BYTES)
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._later: list[wire.Control] = []
        self._later_bytes = 0
        self._flush: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(cls, address: str, key: bytes, regions: Sequence[Region]) -> ShmConnection:
        """The connecting side. Raises NotHere at once when nobody listens, later HandshakeRefused or PeerLost."""
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        endpoint.setblocking(False)
        try:
            endpoint.connect(socket_name(key, address))
        except OSError as error:
            endpoint.close()
            raise NotHere(f"{address} is not on this host ({error.strerror})") from None
        connection = cls(endpoint, regions)
        await connection.prove_as_client(key)
        return connection

    @classmethod
    async def accept(
        cls, endpoint: socket.socket, key: bytes, regions: Sequence[Region], directory: Region | None = None
    ) -> ShmConnection:
        """The listening side. directory: of what lies in the first region. Raises HandshakeRefused or PeerLost."""
        endpoint.setblocking(False)
        connection = cls(endpoint, regions, directory)
        await connection.prove_as_server(key)
        return connection

    def start(self) -> None:
        """As `Connection.start`."""
        if self.error is None:
            self._loop.add_reader(self._socket, self._readable)

    def send(self, message: wire.Control) -> None:
        """As `Connection.send`."""
        if self.error is not None:
            return
        data = wire.encode(message)
        if self._later_bytes + len(data) > wire.MAX_CONTROL_BYTES:
            self._flush_later()
        if self._later:
            data = self._take_later() + data
        self._send(data)

    def send_later(self, message: wire.Control) -> None:
        """Send together with the next message, or in a moment: for what the peer need not be woken for at once.

        Reads of one request are told of as one, so that telling costs the peer less than serving them would.
        """
        if self.error is not None:
            return
        num_bytes = len(wire.encode(message))
        if len(self._later) >= _MAX_LATER or self._later_bytes + num_bytes > wire.MAX_CONTROL_BYTES:
            self._flush_later()
        if self._flush is None:
            self._flush = self._loop.call_later(_LATER_S, self._flush_later)
        self._later_bytes += num_bytes
        last = self._later[-1] if self._later else None
        if isinstance(last, wire.WasRead) and isinstance(message, wire.WasRead) and (joined := last.joined(message)):
            self._later[-1] = joined
        else:
            self._later.append(message)

    def peer_view(self, place: wire.Place) -> memoryview:
        """The peer's memory at a place that it named. Raises ProtocolViolation."""
        region, offset, num_bytes = place
        if not 0 <= region < len(self.peer_memory):
            raise ProtocolViolation("an unknown region")
        memory = self.peer_memory[region]
        if offset < 0 or num_bytes < 0 or offset + num_bytes > len(memory):
            raise ProtocolViolation("a place outside its region")
        return memory[offset : offset + num_bytes]

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._later and not self._unsent:
            # What the peer has not been told yet; it does not matter when it has gone.
            with contextlib.suppress(OSError):
                self._socket.send(self._take_later(), socket.MSG_NOSIGNAL)
        self._socket.close()
        self._unsent.clear()
        self._take_later()
        self.peer_memory = []
        self.peer_directory = None

    def _flush_later(self) -> None:
        if self.error is None and (data := self._take_later()):
            self._send(data)

    def _take_later(self) -> bytes:
        """What waits to be sent; nothing waits afterwards."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        later, self._later, self._later_bytes = self._later, [], 0
        return b"".join(map(wire.encode, later))

    def _send(self, data: bytes) -> None:
        if self._unsent or not self._try_send(data):
            self._queue(data)

    def _try_send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno in _WOULD_BLOCK:
                return False
            self.fail(PeerLost(error.strerror or "the peer has gone"))
        return True

    def _queue(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket, self._writable)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.fail(PeerLost("the peer has stopped reading"))

    def _writable(self) -> None:
        while self._unsent and self._try_send(self._unsent[0]):
            if self._unsent:
                self._unsent_bytes -= len(self._unsent.popleft())
        if not self._unsent and self.error is None:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        """Take one packet; the loop calls again while there are more."""
        try:
            count = self._socket.recv_into(self._buffer)
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self.fail(PeerLost(error.strerror or "the peer has gone"))
            return
        if count == 0:
            self.fail(PeerLost("the peer closed the connection"))
            return
        self._deliver_all(memoryview(self._buffer)[:count])

    def _deliver_all(self, data: memoryview) -> None:
        try:
            for message in wire.split(data):
                if self.error is None:
                    self._deliver(message)
        except ProtocolViolation as violation:
            self.fail(violation)

    async def _agreed(self, key: bytes, hello_nonce: bytes, challenge_nonce: bytes, *, as_client: bool) -> None:
        """Only now, when both sides have proved the secret, memory is shown."""
        regions = [*self.regions, self._directory] if self._directory else self.regions
        data = wire.encode(wire.Regions(len(regions), self._directory is not None))
        shown = [region.descriptor for region in regions]
        try:
            socket.send_fds(self._socket, [data], shown, socket.MSG_NOSIGNAL)
            await self._readable_again()
            data, descriptors, _, _ = socket.recv_fds(
                self._socket, wire.FRAME_BYTES, MAX_REGIONS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise PeerLost(error.strerror or "the peer has gone") from None
        if not data:
            raise PeerLost("the peer closed the connection")
        try:
            message = handshake_message(data, wire.Regions)
            if message.count != len(descriptors) or message.count < message.has_directory:
                raise ProtocolViolation("regions are missing")
            while descriptors:
                self.peer_memory.append(map_received(descriptors.pop(0)))
            if message.has_directory:
                self.peer_directory = DirectoryReader(self.peer_memory.pop())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _say(self, message: wire.Control) -> None:
        if not self._try_send(wire.encode(message)):
            raise PeerLost("the peer does not read")
        if self.error is not None:
            raise self.error

    async def _expect(self, kind: type[T]) -> T:
        await self._readable_again()
        try:
            data = self._socket.recv(wire.MAX_CONTROL_BYTES)
        except OSError as error:
            raise PeerLost(error.strerror or "the peer has gone") from None
        if not data:
            raise PeerLost("the peer closed the connection")
        return handshake_message(data, kind)

    async def _readable_again(self) -> None:
        """Wait until there is something to receive."""
        ready = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(self._socket, wake)
        try:
            await ready
        finally:
            if self.error is None:
                self._loop.remove_reader(self._socket)
