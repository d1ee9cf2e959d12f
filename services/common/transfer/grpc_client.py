"""The client's side of the gRPC transport. Payloads are copied out of messages into the buffers.

gRPC's own keepalive is too slow to notice a stopped peer within a second, so health checks run beside an operation
whenever its peer has sent nothing for a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc

from services.common.blocks import join_ids
from services.common.rpc import REQUEST_ID_METADATA, TOKEN_METADATA, open_channel
from services.common.security import MeshSecret
from services.common.transfer.errors import (
    HandshakeRefused,
    PeerLost,
    ProtocolViolation,
    TransferError,
    TransferTimeout,
)
from services.common.transfer.protocol import (
    HEARTBEAT_S,
    SILENT_HEARTBEATS,
    STOP_COMPLETE,
    STOP_MISSING,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
)

EPOCH_METADATA = "x-kvmesh-epoch"
STOP_METADATA = "x-kvmesh-stop"
# Silence is noticed after two heartbeats and this.
_PROBE_TIMEOUT_S = HEARTBEAT_S * (SILENT_HEARTBEATS - 2)
_MAX_CHANNELS = 256


class GrpcTransport:
    """Transport over the BlockTransfer service."""

    name = "grpc"

    def __init__(self, secret: MeshSecret) -> None:
        self._secret = secret
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._in_use: dict[str, int] = {}
        self._heard: dict[str, _Heard] = {}

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`."""
        async with self._operation(peer, request.deadline_s) as (channel, heard):
            heads = request.heads
            message = transfer_pb2.PullRequest(
                block_ids=join_ids(request.ids),
                epoch=request.epoch,
                deadline_s=request.deadline_s,
                heads=transfer_pb2.HeadRange(first=heads.first, count=heads.count) if heads else None,
                wait_s=request.wait_s,
            )
            metadata = (*self._metadata(request.traceparent), (REQUEST_ID_METADATA, request.request_id or "-"))
            call = transfer_pb2_grpc.BlockTransferStub(channel).Pull(
                message, metadata=metadata, timeout=request.deadline_s
            )
            count = 0
            async for chunk in call:
                heard.mark()
                if count >= len(buffers) or len(chunk.payload) != len(buffers[count]):
                    call.cancel()
                    raise ProtocolViolation("a block that was not asked for")
                buffers[count][:] = chunk.payload
                on_block(count, chunk.header, chunk.tier)
                count += 1
            return PullResult(count, _stop_of(await call.trailing_metadata(), count < len(buffers)), self.name)

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`."""

        async def chunks() -> AsyncIterator[transfer_pb2.PushChunk]:
            for header, payload in zip(request.headers, request.payloads, strict=True):
                yield transfer_pb2.PushChunk(header=header, payload=bytes(payload))

        async with self._operation(peer, request.deadline_s) as (channel, _):
            metadata = (*self._metadata(request.traceparent), (EPOCH_METADATA, str(request.epoch)))
            answer = await transfer_pb2_grpc.BlockTransferStub(channel).Push(
                chunks(), metadata=metadata, timeout=request.deadline_s
            )
            return PushResult(answer.accepted_blocks, len(request.headers) - answer.accepted_blocks, self.name)

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    def _metadata(self, traceparent: str) -> tuple[tuple[str, str], ...]:
        token = ((TOKEN_METADATA, self._secret.rpc_token),)
        return (*token, ("traceparent", traceparent)) if traceparent else token

    @contextlib.asynccontextmanager
    async def _operation(self, peer: PeerAddress, deadline_s: float) -> AsyncIterator[tuple[grpc.aio.Channel, _Heard]]:
        """A channel, probed while the operation runs; every failure inside becomes a TransferError."""
        if not peer.grpc_address:
            raise PeerLost("the peer has no gRPC address")
        channel = await self._channel(peer.grpc_address)
        self._in_use[peer.grpc_address] = self._in_use.get(peer.grpc_address, 0) + 1
        heard = self._heard.setdefault(peer.grpc_address, _Heard())
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                probing = group.create_task(_probe(channel, heard))
                yield channel, heard
                probing.cancel()
        except TimeoutError:
            raise TransferTimeout("the operation's deadline passed") from None
        except BaseExceptionGroup as errors:
            raise _translated(errors) from None
        finally:
            self._in_use[peer.grpc_address] -= 1
            if not self._in_use[peer.grpc_address]:
                del self._in_use[peer.grpc_address], self._heard[peer.grpc_address]

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            idle = [known for known in self._channels if known not in self._in_use]
            if len(self._channels) >= _MAX_CHANNELS and idle:
                await self._channels.pop(idle[0]).close(None)
            self._channels[address] = open_channel(address)
        return self._channels[address]


class _Heard:
    """Counts signs of life of one peer, whichever operation saw them."""

    def __init__(self) -> None:
        self.count = 0

    def mark(self) -> None:
        self.count += 1


async def _probe(channel: grpc.aio.Channel, heard: _Heard) -> None:
    """Raises PeerLost when the peer does not answer and has sent nothing meanwhile."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        before = heard.count
        await asyncio.sleep(HEARTBEAT_S)
        if heard.count != before:
            continue
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
            heard.mark()
        except grpc.aio.AioRpcError as error:
            if heard.count == before:
                raise PeerLost(f"the peer is silent ({error.code().name})") from None


def _translated(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says most. The probe's and the call's come together when a peer dies."""
    found: list[BaseException] = [_transfer_error(error) for error in errors.exceptions]
    found.sort(key=lambda error: not isinstance(error, HandshakeRefused | ProtocolViolation))
    return found[0]


def _transfer_error(error: BaseException) -> BaseException:
    if isinstance(error, grpc.aio.UsageError):
        return PeerLost("the channel is closed")
    if not isinstance(error, grpc.aio.AioRpcError):
        return error
    detail = f"{error.code().name}: {error.details()}"
    kinds: dict[Any, type[TransferError]] = {
        grpc.StatusCode.UNAUTHENTICATED: HandshakeRefused,
        grpc.StatusCode.DEADLINE_EXCEEDED: TransferTimeout,
        grpc.StatusCode.INVALID_ARGUMENT: ProtocolViolation,
    }
    return kinds.get(error.code(), PeerLost)(detail)


def _stop_of(metadata: Any, short: bool) -> str:
    if not short:
        return STOP_COMPLETE
    return str(dict(metadata or ()).get(STOP_METADATA, STOP_MISSING))
