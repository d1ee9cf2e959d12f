"""Which transport a peer is reached over: shared memory on this host, else UCX where it listens, else gRPC.

Nothing has to be configured: a peer that listens on this host's sockets under its gRPC address is on this host. The
choice is logged when it changes, and every transfer is counted under the transport that carried it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from opentelemetry import metrics

from services.common.transfer.protocol import (
    STOP_ELSEWHERE,
    OnBlock,
    PeerAddress,
    PullRequest,
    PullResult,
    PushRequest,
    PushResult,
    Transport,
)
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_connection import NotHere, NotShown

# A peer that was not found on this host is not looked for again for so long.
_LOOK_AGAIN_S = 5.0
_MAX_PEERS = 1024
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.transfer")
_blocks = _meter.create_counter("kvmesh_transfer_blocks", description="Blocks moved, by transport and operation.")
_bytes = _meter.create_counter("kvmesh_transfer_bytes", description="Payload moved, by transport and operation.")
_seconds = _meter.create_histogram("kvmesh_transfer_seconds", unit="s", description="Time of a transfer.")


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """Peers by the transport that the last transfer with them took."""

    peers_by_transport: dict[str, int]


class PreferredTransport:
    """The best transport for each peer; `name` is that towards other hosts, or "shm" when that was all asked for."""

    def __init__(self, name: str, shm: Transport | None, ucx: Transport | None, grpc: Transport) -> None:
        self.name = name
        self._shm = shm
        self._ucx = ucx
        self._grpc = grpc
        self._loop = asyncio.get_running_loop()
        self._absent_until_s: OrderedDict[str, float] = OrderedDict()
        self._paths: OrderedDict[PeerAddress, str] = OrderedDict()

    async def pull(
        self, peer: PeerAddress, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
    ) -> PullResult:
        """As `Transport.pull`. Blocks that are not in memory the holder shows come over the network transport."""
        started_s = self._loop.time()
        first = 0
        if (shm := self._on_this_host(peer)) is not None:
            try:
                result = await shm.pull(peer, request, buffers, on_block)
            except NotHere:
                self._absent(peer)
            else:
                first = result.num_blocks
                self._count(peer, shm.name, "pull", first, sum(map(len, buffers[:first])), started_s)
                if result.stop != STOP_ELSEWHERE:
                    return result
        return await self._pull_rest(peer, request, buffers, on_block, first, started_s)

    def statistics(self) -> PathStatistics:
        """A snapshot."""
        return PathStatistics(dict(Counter(self._paths.values())))

    async def push(self, peer: PeerAddress, request: PushRequest) -> PushResult:
        """As `Transport.push`."""
        started_s = self._loop.time()
        num_bytes = sum(map(len, request.payloads))
        if (shm := self._on_this_host(peer)) is not None:
            try:
                result = await shm.push(peer, request)
            except NotHere:
                self._absent(peer)
            except NotShown:
                pass
            else:
                self._count(peer, shm.name, "push", result.accepted, num_bytes, started_s)
                return result
        remote = self._to(peer)
        result = await remote.push(peer, request)
        self._count(peer, remote.name, "push", result.accepted, num_bytes, started_s)
        return result

    async def close(self) -> None:
        """Close all."""
        for transport in (self._shm, self._ucx, self._grpc):
            if transport is not None:
                await transport.close()

    async def _pull_rest(
        self,
        peer: PeerAddress,
        request: PullRequest,
        buffers: Sequence[memoryview],
        on_block: OnBlock,
        first: int,
        started_s: float,
    ) -> PullResult:
        """Pull the blocks from `first` on over the network."""
        remote = self._to(peer)
        now_s = self._loop.time()
        if first:
            request = replace(request, ids=request.ids[first:], deadline_s=request.deadline_s - (now_s - started_s))
        result = await remote.pull(
            peer, request, buffers[first:], lambda index, header, tier: on_block(first + index, header, tier)
        )
        num_bytes = sum(map(len, buffers[first : first + result.num_blocks]))
        self._count(peer, remote.name, "pull", result.num_blocks, num_bytes, now_s)
        names = f"{ShmTransport.name},{remote.name}" if first else remote.name
        return PullResult(first + result.num_blocks, result.stop, names)

    def _to(self, peer: PeerAddress) -> Transport:
        return self._ucx if self._ucx is not None and peer.pull_address else self._grpc

    def _on_this_host(self, peer: PeerAddress) -> Transport | None:
        if not peer.grpc_address or self._absent_until_s.get(peer.grpc_address, 0.0) > self._loop.time():
            return None
        return self._shm

    def _absent(self, peer: PeerAddress) -> None:
        self._absent_until_s[peer.grpc_address] = self._loop.time() + _LOOK_AGAIN_S
        self._absent_until_s.move_to_end(peer.grpc_address)
        if len(self._absent_until_s) > _MAX_PEERS:
            self._absent_until_s.popitem(last=False)

    def _count(
        self, peer: PeerAddress, transport: str, operation: str, blocks: int, num_bytes: int, started_s: float
    ) -> None:
        if self._paths.get(peer) != transport:
            self._paths[peer] = transport
            _log.info("transfer path", peer=peer.grpc_address or peer.pull_address, transport=transport)
            if len(self._paths) > _MAX_PEERS:
                self._paths.popitem(last=False)
        labels = {"transport": transport, "operation": operation}
        _blocks.add(blocks, labels)
        _bytes.add(num_bytes, labels)
        _seconds.record(self._loop.time() - started_s, labels)
