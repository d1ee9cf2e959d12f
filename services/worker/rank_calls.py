"""How ranks on other hosts get their link to rank 0: their host calls the worker and proves that it was asked to.

A call begins with the token that the host was told over the mesh's own gRPC, and the number of the rank. Whoever says
something else, or nothing, is let go.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from types import TracebackType

import structlog

from services.common.settings import ConfigurationError, ServiceSettings
from services.worker.errors import StartFailed

_GREETING = struct.Struct("<32sI")
_ANY_HOST = ("", "0.0.0.0", "::")
_GREET_TIMEOUT_S = 5.0
_MOST_GREETINGS = 64
# After a call that could not be taken: descriptors may have run out.
_ACCEPT_PAUSE_S = 0.1
_log = structlog.get_logger()


def reachable_host(settings: ServiceSettings) -> str:
    """The name or address of this host, without brackets, by which ranks on other hosts reach those here.

    Raises ConfigurationError.
    """
    host = (settings.advertise_host or settings.listen.rpartition(":")[0]).strip("[]")
    if host in _ANY_HOST:
        raise ConfigurationError(
            f"{settings.service}: listen={settings.listen!r}: advertise_host must say how ranks on other hosts reach it"
        )
    return host


def listening(host: str) -> socket.socket:
    """A socket on a free port of one of this host's addresses, without brackets. Raises StartFailed."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise StartFailed(f"cannot listen on {host} for ranks on other hosts: {error.strerror or error}") from None


def address_of(listener: socket.socket, host: str) -> str:
    """The "host:port" by which others reach it; an IPv6 address is put in brackets."""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{listener.getsockname()[1]}"


async def call_worker(address: str, token: bytes, rank: int, timeout_s: float) -> socket.socket:
    """The link of a rank to its worker. Raises OSError, or TimeoutError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        sock = _without_delay(socket.socket(family, kind, protocol))
        try:
            await loop.sock_connect(sock, target)
            await loop.sock_sendall(sock, _GREETING.pack(token, rank))
        except BaseException:
            sock.close()
            raise
    return sock


class RankCalls:
    """The worker's side, while a group starts: an async context manager."""

    def __init__(self, host: str) -> None:
        """host: an address of this host that the others reach. Raises StartFailed."""
        self._listener = listening(host)
        self._listener.setblocking(False)
        self.address = address_of(self._listener, host)
        self.token = secrets.token_bytes(32)
        self._links: dict[int, asyncio.Future[socket.socket]] = {}
        self._greetings = asyncio.Semaphore(_MOST_GREETINGS)
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RankCalls:
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        greeting = dict(self._greeting)
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        for sock in greeting.values():
            sock.close()
        for link in self._links.values():
            if link.done() and not link.cancelled():
                link.result().close()

    async def link(self, rank: int, timeout_s: float) -> socket.socket:
        """The rank's link, which stays this object's. Raises StartFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._link(rank))
        except TimeoutError:
            raise StartFailed(f"rank {rank} did not call within {timeout_s:.0f} s") from None

    def _link(self, rank: int) -> asyncio.Future[socket.socket]:
        return self._links.setdefault(rank, asyncio.get_running_loop().create_future())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._greetings.acquire()
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError as error:
                self._greetings.release()
                _log.warning("a call cannot be taken", error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._greeted(_without_delay(sock), address))
            self._greeting[task] = sock
            task.add_done_callback(self._greeted_out)

    def _greeted_out(self, task: asyncio.Task[None]) -> None:
        del self._greeting[task]
        self._greetings.release()

    async def _greeted(self, sock: socket.socket, address: object) -> None:
        try:
            async with asyncio.timeout(_GREET_TIMEOUT_S):
                token, rank = _GREETING.unpack(await _exactly(sock, _GREETING.size))
        except (OSError, TimeoutError, EOFError):
            token, rank = b"", 0
        if not hmac.compare_digest(token, self.token) or self._link(rank).done():
            _log.warning("a call that is no rank's of this replica", address=address)
            sock.close()
            return
        self._link(rank).set_result(sock)


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise EOFError("the call ended")
        data += more
    return data


def _without_delay(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
