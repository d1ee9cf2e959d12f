"""A process's whole share in transfers: the client transport and the servers, by the setting `transport`.

auto takes shared memory towards peers on this host, else UCX where ucxx can be imported, else gRPC; shm does without
UCX; ucx takes UCX alone and insists on it; grpc takes that alone. The gRPC service is offered in any case, for peers
that have no UCX, and a client with UCX uses it towards peers that have no pull address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import structlog
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.grpc_server import BlockTransferServicer
from services.common.transfer.preferred import PreferredTransport
from services.common.transfer.protocol import BlockSink, BlockSource
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_directory import ShownDirectory
from services.common.transfer.shm_regions import Region, shm_supported
from services.common.transfer.shm_server import ShmServer
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor, ucx_importable
from services.common.transfer.ucx_server import UcxServer

TransportMode = Literal["auto", "shm", "ucx", "grpc"]
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.transfer")
_in_use = _meter.create_up_down_counter("kvmesh_transfer_transport", description="1 for the transport in use.")


class TransferEndpoint:
    """Made inside the running loop. `transport` is the client; `attach`, `listen` and `listen_shm` make the servers."""

    def __init__(
        self,
        mode: TransportMode,
        secret: MeshSecret,
        source: BlockSource,
        sink: BlockSink,
        *,
        max_operation_s: float,
        regions: Sequence[Region] = (),
        directory: ShownDirectory | None = None,
    ) -> None:
        """regions: where the blocks lie that peers on this host may read. directory: of those in the first region.

        Raises ConfigurationError when UCX is insisted on and cannot be used.
        """
        key = secret.pull_key
        self._reactor = UcxReactor() if _use_ucx(mode) else None
        ucx = UcxTransport(self._reactor, key) if self._reactor else None
        use_shm = mode in ("auto", "shm") and shm_supported()
        shm = ShmTransport(key, regions) if use_shm else None
        name = "ucx" if ucx else "shm" if mode == "shm" else "grpc"
        self.transport = PreferredTransport(name, shm, ucx, GrpcTransport(secret))
        self._server = (
            UcxServer(self._reactor, key, source, sink, max_operation_s=max_operation_s) if self._reactor else None
        )
        self._shm_server = (
            ShmServer(key, source, sink, regions, max_operation_s=max_operation_s, directory=directory)
            if use_shm and regions
            else None
        )
        self._servicer = BlockTransferServicer(source, sink, max_operation_s=max_operation_s)
        _meter.create_observable_gauge("kvmesh_transfer_peers", [self._peers], description="Peers, by last transport.")
        _in_use.add(1, {"transport": self.transport.name})
        _log.info("transfer transport", transport=self.transport.name, same_host="shm" if use_shm else "", asked=mode)

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

    def listen_shm(self, grpc_address: str) -> None:
        """Let peers on this host, who know this process by `grpc_address`, read its memory."""
        if self._shm_server is None:
            return
        try:
            self._shm_server.start(grpc_address)
        except OSError as error:
            _log.warning("no shared memory for peers on this host", detail=error.strerror)

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing more for others and let what runs finish."""
        async with asyncio.TaskGroup() as group:
            for server in (self._server, self._shm_server):
                if server is not None:
                    group.create_task(server.drain(timeout_s))

    async def close(self) -> None:
        """Close every connection and give all memory back."""
        await self.transport.close()
        for server in (self._server, self._shm_server):
            if server is not None:
                await server.close()
        if self._reactor is not None:
            self._reactor.close()

    def _peers(self, _: CallbackOptions) -> list[Observation]:
        peers = self.transport.statistics().peers_by_transport
        return [Observation(count, {"transport": transport}) for transport, count in peers.items()]


def _use_ucx(mode: TransportMode) -> bool:
    if mode in ("grpc", "shm"):
        return False
    if ucx_importable():
        return True
    if mode == "ucx":
        raise ConfigurationError("transport='ucx': ucxx cannot be imported")
    _log.warning("ucxx cannot be imported: blocks travel over gRPC")
    return False
