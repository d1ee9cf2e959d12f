"""KvStore over gRPC: translates between proto and the store, nothing else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc.aio
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.blocks import BLOCK_ID_BYTES, split_owner
from services.common.generations import MAX_GENERATION
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.protocol import PeerAddress
from services.kvstore.clearing import Clearing
from services.kvstore.copier import Copier, CopyAsk
from services.kvstore.latencies import Latencies
from services.kvstore.metrics import ReplicationTotals
from services.kvstore.store import Store


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Statistics of one node, and what an operator may do to it."""

    def __init__(
        self, store: Store, clearing: Clearing, copier: Copier, replication: ReplicationTotals, kvstore_id: str
    ) -> None:
        self._store = store
        self._copier = copier
        self._replication = replication
        self._clearing = clearing
        self._kvstore_id = kvstore_id

    async def Stats(
        self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.StatsResponse:
        """Totals since start and what is held now."""
        now, totals = self._store.statistics(), self._store.totals
        ram = now.ram
        return kvstore_pb2.StatsResponse(
            kvstore_id=self._kvstore_id,
            epoch=self._store.epoch,
            ram_blocks=ram.num_blocks,
            ram_bytes=ram.num_bytes,
            ram_capacity_bytes=ram.capacity_bytes,
            hit_blocks=totals.hit_blocks,
            miss_blocks=totals.miss_blocks,
            pushed_blocks=totals.pushed_blocks,
            evicted_blocks=totals.evicted_blocks,
            rejected_blocks=totals.rejected_blocks,
            verification_failures=totals.verification_failures,
            open_leases=totals.open_leases,
            ssd_hit_blocks=totals.ssd_hit_blocks,
            ssd=_ssd(self._store),
            leased_blocks=ram.leased_blocks,
            partial_blocks=now.partial.num_blocks,
            dropped_partial_blocks=totals.dropped_partial_blocks,
            cleared_blocks=totals.cleared_blocks,
            cleared_tenants=now.cleared_tenants,
            pulls=[_pulls(tier, latencies) for tier, latencies in totals.pulls.items()],
            replication=kvstore_pb2.ReplicationStats(**asdict(self._replication)),
        )

    async def Clear(
        self, request: kvstore_pb2.ClearRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.ClearResponse:
        """Drop what a tenant's clearing makes old."""
        if len(request.owner_digest) != BLOCK_ID_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"owner_digest is not {BLOCK_ID_BYTES} bytes")
        tag, generation = split_owner(request.owner_digest)
        if generation > MAX_GENERATION:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"generation {generation} is no time")
        try:
            await self._clearing.carry_out({tag: generation})
        except OSError as error:
            await context.abort(grpc.StatusCode.ABORTED, f"keys are still there: {type(error).__name__}: {error}")
        cleared = self._clearing.done(tag)
        return kvstore_pb2.ClearResponse(
            ram_blocks=cleared.ram_blocks, ssd_blocks=cleared.ssd_blocks, destroyed_keys=cleared.destroyed_keys
        )

    async def Replicate(
        self, request: kvstore_pb2.ReplicateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.ReplicateResponse:
        """Copy a chain from another node, later."""
        source = PeerAddress(request.pull_address, request.grpc_address)
        ask = CopyAsk(request.headers, request.created_s, request.source_id, request.source_epoch, source)
        try:
            held, refused = self._copier.take(ask)
        except BlockInvalid as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not the beginning of a chain: {error.reason}")
        return kvstore_pb2.ReplicateResponse(held_blocks=held, refused=refused)


def _pulls(tier: str, latencies: Latencies) -> kvstore_pb2.TierPulls:
    now = latencies.statistics()
    return kvstore_pb2.TierPulls(tier=tier, pulls=now.count, p50_s=now.p50_s, p99_s=now.p99_s)


def _ssd(store: Store) -> kvstore_pb2.SsdStats | None:
    layer = store.ssd
    if layer is None:
        return kvstore_pb2.SsdStats(state=store.totals.ssd_fault) if store.totals.ssd_fault else None
    layer_now, totals = layer.statistics(), layer.tier.totals
    now = layer_now.tier
    return kvstore_pb2.SsdStats(
        state=now.state,
        blocks=now.num_blocks,
        payload_bytes=now.num_bytes,
        used_bytes=now.used_bytes,
        capacity_bytes=now.capacity_bytes,
        segments=now.num_segments,
        owners=now.num_owners,
        spilled_blocks=totals.spilled_blocks,
        read_blocks=totals.read_blocks,
        dropped_blocks=totals.dropped_blocks,
        copied_blocks=totals.copied_blocks,
        reclaimed_blocks=totals.reclaimed_blocks,
        verification_failures=totals.verification_failures,
        queued_blocks=layer_now.spiller.num_queued,
        encrypted=now.is_encrypted,
        cleared_blocks=totals.cleared_blocks,
        loads=layer_now.loader.num_loads,
    )
