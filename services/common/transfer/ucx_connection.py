"""A connection over a UCX endpoint. Closing it makes UCX let go of every buffer posted on it."""

from __future__ import annotations

from typing import TypeVar

from services.common.transfer import wire
from services.common.transfer.connection import MAX_UNSENT_BYTES, Connection, handshake_message
from services.common.transfer.errors import PeerLost
from services.common.transfer.ucx_reactor import UcxEndpoint

T = TypeVar("T", bound=wire.Control)


class UcxConnection(Connection):
    """Made by `connect` or `accept`."""

    def __init__(self, endpoint: UcxEndpoint) -> None:
        super().__init__()
        self.endpoint = endpoint
        # Set by the handshake: tags of what this side receives, and of what it sends.
        self._receive_tags: wire.TagSequence | None = None
        self._send_tags: wire.TagSequence | None = None
        self._control = bytearray(wire.MAX_CONTROL_BYTES)
        self._unsent_bytes = 0
        endpoint.on_closed(self._broken)

    @classmethod
    async def connect(cls, endpoint: UcxEndpoint, key: bytes) -> UcxConnection:
        """The connecting side. Raises HandshakeRefused or PeerLost; the endpoint is then closed."""
        connection = cls(endpoint)
        await connection.prove_as_client(key)
        return connection

    @classmethod
    async def accept(cls, endpoint: UcxEndpoint, key: bytes) -> UcxConnection:
        """The listening side. Raises HandshakeRefused or PeerLost; the endpoint is then closed."""
        connection = cls(endpoint)
        await connection.prove_as_server(key)
        return connection

    def start(self) -> None:
        """As `Connection.start`."""
        self._receive_next()

    def send(self, message: wire.Control) -> None:
        """As `Connection.send`."""
        if self.error is not None:
            return
        assert self._send_tags is not None
        data = wire.encode(message)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.fail(PeerLost("the peer has stopped reading"))
            return

        def sent(error: PeerLost | None) -> None:
            self._unsent_bytes -= len(data)
            if error is not None:
                self.fail(error)

        self.endpoint.tag_send(data, self._send_tags.control, sent)

    def take_send_tags(self, count: int) -> int:
        """First of `count` tags for payloads that this side sends."""
        assert self._send_tags is not None
        return self._send_tags.take(count)

    def take_receive_tags(self, count: int) -> int:
        """First of `count` tags for payloads that this side receives."""
        assert self._receive_tags is not None
        return self._receive_tags.take(count)

    def _close(self) -> None:
        self.endpoint.close()

    def _broken(self) -> None:
        self.fail(PeerLost("the peer closed the connection"))

    def _receive_next(self) -> None:
        if self.error is None:
            assert self._receive_tags is not None
            self.endpoint.tag_recv(self._control, self._receive_tags.control, self._received)

    def _received(self, error: PeerLost | None) -> None:
        if error is not None:
            self.fail(error)
        if self.error is not None:
            return
        self._deliver(self._control)
        self._receive_next()

    async def _agreed(self, key: bytes, hello_nonce: bytes, challenge_nonce: bytes, *, as_client: bool) -> None:
        to_client = wire.TagSequence(key, b"to client", hello_nonce, challenge_nonce)
        to_server = wire.TagSequence(key, b"to server", hello_nonce, challenge_nonce)
        self._receive_tags, self._send_tags = (to_client, to_server) if as_client else (to_server, to_client)

    async def _say(self, message: wire.Control) -> None:
        await self.endpoint.stream_send(wire.encode(message).ljust(wire.FRAME_BYTES, b"\0"))

    async def _expect(self, kind: type[T]) -> T:
        frame = bytearray(wire.FRAME_BYTES)
        await self.endpoint.stream_recv(frame)
        return handshake_message(frame, kind)
