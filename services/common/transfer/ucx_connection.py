"""One authenticated UCX connection, either end: handshake, control messages, heartbeat, failure.

`fail` is the only way a connection ends. It closes the endpoint, which makes UCX let go of every buffer posted on it,
and then tells the owner. While an operation is under way both ends send heartbeats; SILENT_HEARTBEATS of them without
hearing anything fail the connection. Heartbeats are counted, not timed, so a process that was itself suspended does
not blame its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from services.common.transfer import wire
from services.common.transfer.errors import HandshakeRefused, PeerLost, ProtocolViolation, TransferError
from services.common.transfer.protocol import CONNECT_TIMEOUT_S, HEARTBEAT_S, PROTOCOL_VERSION, SILENT_HEARTBEATS
from services.common.transfer.ucx_reactor import Completed, UcxEndpoint

MAX_UNSENT_BYTES = 64 * 2**20
_log = structlog.get_logger()
T = TypeVar("T", bound=wire.Control)


class UcxConnection:
    """Made by `connect` or `accept`. Owners set `on_message` and `on_failed` before `start`."""

    def __init__(self, endpoint: UcxEndpoint) -> None:
        self.endpoint = endpoint
        self.error: TransferError | None = None
        self.on_message: Callable[[wire.AnyControl], None] = lambda _: None
        self.on_failed: Callable[[TransferError], None] = lambda _: None
        self.num_operations = 0
        # Set by the handshake: tags of what this side receives, and of what it sends.
        self._receive_tags: wire.TagSequence | None = None
        self._send_tags: wire.TagSequence | None = None
        self._control = bytearray(wire.MAX_CONTROL_BYTES)
        self._unsent_bytes = 0
        self._silent = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        endpoint.on_closed(self._broken)

    @classmethod
    async def connect(cls, endpoint: UcxEndpoint, key: bytes) -> UcxConnection:
        """The connecting side's handshake. Raises HandshakeRefused or PeerLost; the endpoint is then closed."""
        connection = cls(endpoint)
        await connection._handshake(connection._prove_as_client(key))
        return connection

    @classmethod
    async def accept(cls, endpoint: UcxEndpoint, key: bytes) -> UcxConnection:
        """The listening side's handshake. Raises HandshakeRefused or PeerLost; the endpoint is then closed."""
        connection = cls(endpoint)
        await connection._handshake(connection._prove_as_server(key))
        return connection

    def start(self) -> None:
        """Deliver messages from now on."""
        self._receive_next()

    def send(self, message: wire.Control) -> None:
        """Queue a message. A connection that has failed, or whose peer does not read, drops it and fails."""
        if self.error is not None:
            return
        assert self._send_tags is not None
        data = wire.encode(message)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.fail(PeerLost("the peer has stopped reading"))
            return

        def sent(future: Completed) -> None:
            self._unsent_bytes -= len(data)
            if not future.cancelled() and (error := future.exception()) is not None:
                self.fail(PeerLost(str(error)))

        self.endpoint.tag_send(data, self._send_tags.control).add_done_callback(sent)

    def take_send_tags(self, count: int) -> int:
        """First of `count` tags for payloads that this side sends."""
        assert self._send_tags is not None
        return self._send_tags.take(count)

    def take_receive_tags(self, count: int) -> int:
        """First of `count` tags for payloads that this side receives."""
        assert self._receive_tags is not None
        return self._receive_tags.take(count)

    def begin(self) -> None:
        """An operation starts: heartbeats go out while there are any."""
        self.num_operations += 1
        if self._heartbeat is None:
            self._silent = 0
            self._schedule_heartbeat()

    def end(self) -> None:
        """An operation is over."""
        self.num_operations -= 1

    def fail(self, error: TransferError) -> None:
        """Close; buffers are free when their futures are done. Only the first call counts."""
        if self.error is not None:
            return
        self.error = error
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self.endpoint.close()
        self.on_failed(error)

    def _broken(self) -> None:
        self.fail(PeerLost("the peer closed the connection"))

    def _schedule_heartbeat(self) -> None:
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        self._heartbeat = None
        if self.error is not None or self.num_operations == 0:
            return
        self._silent += 1
        if self._silent >= SILENT_HEARTBEATS:
            self.fail(PeerLost("the peer is silent"))
            return
        self.send(wire.Ping())
        self._schedule_heartbeat()

    def heard(self) -> None:
        """The peer has shown that it is alive."""
        self._silent = 0

    def _receive_next(self) -> None:
        if self.error is None:
            assert self._receive_tags is not None
            self.endpoint.tag_recv(self._control, self._receive_tags.control).add_done_callback(self._received)

    def _received(self, future: Completed) -> None:
        if self.error is not None or future.cancelled():
            return
        if (error := future.exception()) is not None:
            self.fail(PeerLost(str(error)))
            return
        self.heard()
        try:
            self._deliver(wire.decode(self._control))
        except ProtocolViolation as violation:
            _log.warning("a peer broke the transfer protocol", detail=str(violation))
            self.fail(violation)
        self._receive_next()

    def _deliver(self, message: wire.AnyControl) -> None:
        if isinstance(message, wire.Ping):
            self.send(wire.Pong())
        elif not isinstance(message, wire.Pong):
            self.on_message(message)

    async def _handshake(self, steps: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await steps
        except TimeoutError:
            self.fail(PeerLost("no handshake in time"))
        except TransferError as error:
            self.fail(error)
        except BaseException:
            self.fail(PeerLost("given up"))
            raise
        if self.error is not None:
            raise self.error

    async def _prove_as_client(self, key: bytes) -> None:
        nonce = os.urandom(wire.NONCE_BYTES)
        await self._say(wire.Hello(PROTOCOL_VERSION, nonce))
        challenge = await self._expect(wire.Challenge)
        if challenge.version != PROTOCOL_VERSION or len(challenge.nonce) != wire.NONCE_BYTES:
            raise HandshakeRefused(f"the peer speaks version {challenge.version}")
        expected = wire.proof(key, b"server", PROTOCOL_VERSION, nonce, challenge.nonce)
        if not hmac.compare_digest(expected, challenge.proof):
            raise HandshakeRefused("the peer does not know the mesh secret")
        await self._say(wire.Proof(wire.proof(key, b"client", PROTOCOL_VERSION, nonce, challenge.nonce)))
        await self._expect(wire.Welcome)
        self._receive_tags = wire.TagSequence(key, b"to client", nonce, challenge.nonce)
        self._send_tags = wire.TagSequence(key, b"to server", nonce, challenge.nonce)

    async def _prove_as_server(self, key: bytes) -> None:
        hello = await self._expect(wire.Hello)
        if hello.version != PROTOCOL_VERSION or len(hello.nonce) != wire.NONCE_BYTES:
            await self._refuse(f"version {hello.version} is not {PROTOCOL_VERSION}")
        nonce = os.urandom(wire.NONCE_BYTES)
        mine = wire.proof(key, b"server", PROTOCOL_VERSION, hello.nonce, nonce)
        await self._say(wire.Challenge(PROTOCOL_VERSION, nonce, mine))
        answer = await self._expect(wire.Proof)
        if not hmac.compare_digest(wire.proof(key, b"client", PROTOCOL_VERSION, hello.nonce, nonce), answer.proof):
            await self._refuse("wrong mesh secret")
        self._receive_tags = wire.TagSequence(key, b"to server", hello.nonce, nonce)
        self._send_tags = wire.TagSequence(key, b"to client", hello.nonce, nonce)
        await self._say(wire.Welcome())

    async def _refuse(self, reason: str) -> None:
        # Closing at once would overtake the message; the other end closes, or the caller's timeout ends the wait.
        await self._say(wire.Refused(reason))
        with contextlib.suppress(PeerLost, TimeoutError):
            await self._expect(wire.Proof)
        raise HandshakeRefused(reason)

    async def _say(self, message: wire.Control) -> None:
        await asyncio.shield(self.endpoint.stream_send(wire.encode(message).ljust(wire.FRAME_BYTES, b"\0")))

    async def _expect(self, kind: type[T]) -> T:
        frame = bytearray(wire.FRAME_BYTES)
        await asyncio.shield(self.endpoint.stream_recv(frame))
        message = wire.decode(frame)
        if isinstance(message, wire.Refused):
            raise HandshakeRefused(message.reason)
        if not isinstance(message, kind):
            raise ProtocolViolation(f"{type(message).__name__} instead of {kind.__name__}")
        return message
