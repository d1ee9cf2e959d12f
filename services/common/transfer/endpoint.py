"""A process's whole share in transfers: the client transport and the servers, by the setting `transport`.

auto takes UCX where ucxx can be imported and gRPC otherwise; ucx insists. The gRPC service is offered in any case, for
peers that have no UCX, and a client with UCX uses it towards peers that have no pull address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import structlog
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc
from opentelemetry import metrics

from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.grpc_server import BlockTransferServicer
from services.common.transfer.protocol import (
    BlockSink,
    BlockSource,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
    Transport,
)
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor, ucx_importable
from services.common.transfer.ucx_server import UcxServer

TransportMode = Literal["auto", "ucx", "grpc"]
_log = structlog.get_logger()
_in_use = metrics.get_meter("kvmesh.transfer").create_up_down_counter(
    "kvmesh_transfer_transport", description="1 for the transport in use."
)


class PreferredTransport:
    """UCX towards peers that listen with it, gRPC towards the others."""

    def __init__(self, ucx: UcxTransport | None, grpc: GrpcTransport) -> None:
        self.name = "ucx" if ucx is not None else "grpc"
        self._ucx = ucx
        self._grpc = grpc

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`."""
        return await self._to(peer).pull(peer, request, buffers, on_block)

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`."""
        return await self._to(peer).push(peer, request)

    async def close(self) -> None:
        """Close both."""
        if self._ucx is not None:
            await self._ucx.close()
        await self._grpc.close()

    def _to(self, peer: PeerAddress) -> Transport:
        return self._ucx if self._ucx is not None and peer.pull_address else self._grpc


class TransferEndpoint:
    """Made inside the running loop. `transport` is the client; `attach` and `listen` make the servers."""

    def __init__(
        self, mode: TransportMode, secret: MeshSecret, source: BlockSource, sink: BlockSink, *, max_operation_s: float
    ) -> None:
        """Raises ConfigurationError when UCX is insisted on and cannot be used."""
        self._reactor = UcxReactor() if _use_ucx(mode) else None
        ucx = UcxTransport(self._reactor, secret.pull_key) if self._reactor else None
        self.transport = PreferredTransport(ucx, GrpcTransport(secret))
        self._server = (
            UcxServer(self._reactor, secret.pull_key, source, sink, max_operation_s=max_operation_s)
            if self._reactor
            else None
        )
        self._servicer = BlockTransferServicer(source, sink, max_operation_s=max_operation_s)
        _in_use.add(1, {"transport": self.transport.name})
        _log.info("transfer transport", transport=self.transport.name, asked=mode)

    def attach(self, server: MeshServer) -> None:
        """Offer the gRPC service on `server`."""
        server.add(
            transfer_pb2_grpc.add_BlockTransferServicer_to_server,
            self._servicer,
            transfer_pb2.DESCRIPTOR.services_by_name["BlockTransfer"].full_name,
        )

    def listen(self, listen: str, advertise_host: str = "") -> str:
        """Listen with UCX; returns the pull address, empty without UCX. Raises RuntimeError when it is taken."""
        if self._server is None:
            return ""
        host, _, port = listen.rpartition(":")
        return f"{advertise_host or host}:{self._server.start(int(port))}"

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing more for others and let what runs finish."""
        if self._server is not None:
            await self._server.drain(timeout_s)

    async def close(self) -> None:
        """Close every connection and give all memory back."""
        await self.transport.close()
        if self._server is not None:
            await self._server.close()
        if self._reactor is not None:
            self._reactor.close()


def _use_ucx(mode: TransportMode) -> bool:
    if mode == "grpc":
        return False
    if ucx_importable():
        return True
    if mode == "ucx":
        raise ConfigurationError("transport='ucx': ucxx cannot be imported")
    _log.warning("ucxx cannot be imported: blocks travel over gRPC")
    return False
