"""One kept connection to a process, over which it is asked whether it is there: gRPC health, PING, Envoy's `/ready`.

Any answer will do, "not serving" included: whoever answers is neither stopped nor hung. Keeping the connection is what
makes asking cheap. A stopped process is silent; one that has no port refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.plan import ProcessSpec
from services.cli.probes import http_status

# How long a connection may take: that to a stopped process never comes about, and must not look refused.
_CHANNEL_OPTIONS = (("grpc.min_reconnect_backoff_ms", 60_000), ("grpc.use_local_subchannel_pool", 1))
# Longest line of an answer to PING or AUTH.
_MAX_LINE = 1024


class Contact(Protocol):
    """A process that can be asked. Not for several askers at once."""

    async def ask(self) -> None:
        """Return once it has answered; waits for ever. Raises ConnectionError when nobody listens or it hung up."""

    async def close(self) -> None:
        """Hang up. Idempotent."""


def contact(spec: ProcessSpec, redis_password: str) -> Contact:
    """How a process of this kind is asked; nothing is connected yet."""
    if spec.kind == "valkey":
        return _ValkeyContact(spec.address, redis_password)
    if spec.kind == "envoy":
        return _EnvoyContact(spec.admin)
    return _GrpcContact(spec.address)


class _GrpcContact:
    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def ask(self) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        try:
            await health_pb2_grpc.HealthStub(self._channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                # A channel that was refused once repeats that until it is connected, which may be never.
                await self.close()
                raise ConnectionError(error.details()) from None

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None


class _ValkeyContact:
    def __init__(self, address: str, password: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._password = password
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> None:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, int(self._port), limit=_MAX_LINE)
                await self._exchange(f"AUTH {self._password}")
            await self._exchange("PING")
        except (OSError, ValueError) as error:
            await self.close()
            raise ConnectionError(str(error)) from None

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _exchange(self, command: str) -> None:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(f"{command}\r\n".encode())
        if not await reader.readline():
            raise ConnectionError("hung up")


class _EnvoyContact:
    """Its admin page closes each connection, so there is none to keep."""

    def __init__(self, admin: str) -> None:
        self._admin = admin

    async def ask(self) -> None:
        # A line that is no status is an answer, too.
        with contextlib.suppress(ValueError):
            try:
                await http_status(self._admin, "/ready")
            except OSError as error:
                raise ConnectionError(str(error)) from None

    async def close(self) -> None:
        """Nothing is open."""
