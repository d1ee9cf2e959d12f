"""KvStore over gRPC: translates between proto and the store, nothing else."""

from __future__ import annotations

from typing import Any

import grpc.aio
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.kvstore.store import Store


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Statistics of one node."""

    def __init__(self, store: Store, kvstore_id: str) -> None:
        self._store = store
        self._kvstore_id = kvstore_id

    async def Stats(
        self, request: kvstore_pb2.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kvstore_pb2.StatsResponse:
        """Totals since start and what is held now."""
        ram, totals = self._store.statistics(), self._store.totals
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
        )
