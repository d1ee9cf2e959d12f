"""One authenticated connection, either end, whatever carries it: handshake, heartbeat, failure.

A connection begins Hello ▸ Challenge ▸ Proof ▸ Welcome, which proves the mesh secret to both sides. `fail` is the only
way in which it ends: what carries it is closed, which frees every buffer it was given, and then the owner is told.
While an operation is under way both ends send heartbeats; SILENT_HEARTBEATS of them without hearing anything fail the
connection. Heartbeats are counted, not timed, so a process that was itself suspended does not blame its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from services.common.transfer import wire
from services.common.transfer.errors import HandshakeRefused, PeerLost, ProtocolViolation, TransferError
from services.common.transfer.protocol import CONNECT_TIMEOUT_S, HEARTBEAT_S, PROTOCOL_VERSION, SILENT_HEARTBEATS

MAX_UNSENT_BYTES = 64 * 2**20
_log = structlog.get_logger()
T = TypeVar("T", bound=wire.Control)


class Connection(ABC):
    """Owners set `on_message` and `on_failed` before `start`."""

    def __init__(self) -> None:
        self.error: TransferError | None = None
        self.on_message: Callable[[wire.AnyControl], None] = lambda _: None
        self.on_failed: Callable[[TransferError], None] = lambda _: None
        self.num_operations = 0
        self._silent = 0
        self._heartbeat: asyncio.TimerHandle | None = None

    @abstractmethod
    def start(self) -> None:
        """Deliver messages from now on."""

    @abstractmethod
    def send(self, message: wire.Control) -> None:
        """Queue a message. A connection that has failed, or whose peer does not read, drops it and fails."""

    @abstractmethod
    def _close(self) -> None:
        """Close what carries the connection."""

    @abstractmethod
    async def _say(self, message: wire.Control) -> None:
        """Send a message of the handshake."""

    @abstractmethod
    async def _expect(self, kind: type[T]) -> T:
        """Receive a message of the handshake. Raises HandshakeRefused or ProtocolViolation for any other."""

    @abstractmethod
    async def _agreed(self, key: bytes, hello_nonce: bytes, challenge_nonce: bytes, *, as_client: bool) -> None:
        """Both sides have proved the secret."""

    def begin(self) -> None:
        """An operation starts: heartbeats go out while there are any."""
        self.num_operations += 1
        if self._heartbeat is None:
            self._silent = 0
            self._schedule_heartbeat()

    def end(self) -> None:
        """An operation is over."""
        self.num_operations -= 1

    def heard(self) -> None:
        """The peer has shown that it is alive."""
        self._silent = 0

    def fail(self, error: TransferError) -> None:
        """Close; buffers are free when their operations are done. Only the first call counts."""
        if self.error is not None:
            return
        self.error = error
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._close()
        self.on_failed(error)

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

    def _deliver(self, data: bytes | bytearray | memoryview) -> None:
        self.heard()
        try:
            message = wire.decode(data)
            if isinstance(message, wire.Ping):
                self.send(wire.Pong())
            elif not isinstance(message, wire.Pong):
                self.on_message(message)
        except ProtocolViolation as violation:
            _log.warning("a peer broke the transfer protocol", detail=str(violation))
            self.fail(violation)

    async def prove_as_client(self, key: bytes) -> None:
        """The connecting side's handshake. Raises HandshakeRefused or PeerLost; the connection has then failed."""
        await self._handshake(self._client_steps(key))

    async def prove_as_server(self, key: bytes) -> None:
        """The listening side's handshake. Raises HandshakeRefused or PeerLost; the connection has then failed."""
        await self._handshake(self._server_steps(key))

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

    async def _client_steps(self, key: bytes) -> None:
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
        await self._agreed(key, nonce, challenge.nonce, as_client=True)

    async def _server_steps(self, key: bytes) -> None:
        hello = await self._expect(wire.Hello)
        if hello.version != PROTOCOL_VERSION or len(hello.nonce) != wire.NONCE_BYTES:
            await self._refuse(f"version {hello.version} is not {PROTOCOL_VERSION}")
        nonce = os.urandom(wire.NONCE_BYTES)
        mine = wire.proof(key, b"server", PROTOCOL_VERSION, hello.nonce, nonce)
        await self._say(wire.Challenge(PROTOCOL_VERSION, nonce, mine))
        answer = await self._expect(wire.Proof)
        if not hmac.compare_digest(wire.proof(key, b"client", PROTOCOL_VERSION, hello.nonce, nonce), answer.proof):
            await self._refuse("wrong mesh secret")
        await self._say(wire.Welcome())
        await self._agreed(key, hello.nonce, nonce, as_client=False)

    async def _refuse(self, reason: str) -> None:
        # Closing at once would overtake the message; the other end closes, or the caller's timeout ends the wait.
        await self._say(wire.Refused(reason))
        with contextlib.suppress(PeerLost, TimeoutError):
            await self._expect(wire.Proof)
        raise HandshakeRefused(reason)


def handshake_message(data: bytes | bytearray, kind: type[T]) -> T:
    """The message in `data`, which must be a `kind`. Raises HandshakeRefused or ProtocolViolation."""
    message = wire.decode(data)
    if isinstance(message, wire.Refused):
        raise HandshakeRefused(message.reason)
    if not isinstance(message, kind):
        raise ProtocolViolation(f"{type(message).__name__} instead of {kind.__name__}")
    return message
