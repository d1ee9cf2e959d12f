"""Asks other nodes to copy what is wanted here too often. Never waited for: what cannot be asked now is dropped.

Pulls from this host are demand only while the node is busy, for a copy elsewhere would not bring them nearer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio
import structlog
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.blocks import BlockId
from services.common.registry import LocationRecord
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.kvstore.demand import CopyPlan, Demand
from services.kvstore.metrics import ReplicationTotals
from services.kvstore.ram_tier import Entry, RamTier

# Most blocks of one copy; the rest of a longer chain stays where it is.
MAX_COPY_BLOCKS = 1024
_MAX_QUEUED = 16
_ASK_TIMEOUT_S = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReplicationLimits:
    """See the settings of the same names."""

    leases: int
    window_s: float
    nodes: int
    busy_leases: int


@dataclass(frozen=True, slots=True)
class _Wish:
    """A hot chain by its last block, and who should copy it."""

    tip: BlockId
    node: LocationRecord


class Replicator:
    """`served` is told of every pull; `run` asks until cancelled."""

    def __init__(
        self,
        limits: ReplicationLimits,
        own: LocationRecord,
        ram: RamTier,
        totals: ReplicationTotals,
        records: Mapping[str, LocationRecord],
        secret: MeshSecret,
    ) -> None:
        """records: of the whole mesh by location, kept current by their owner."""
        self._limits = limits
        self._own = own
        self._ram = ram
        self._totals = totals
        self._records = records
        self._secret = secret
        self._demand = Demand(leases=limits.leases, window_s=limits.window_s)
        self._plan = CopyPlan(own.id, nodes=limits.nodes, window_s=limits.window_s)
        self._wishes: asyncio.Queue[_Wish] = asyncio.Queue(_MAX_QUEUED)

    def served(self, ids: Sequence[BlockId], same_host: bool, open_leases: int) -> None:
        """A pull of these blocks begins, or was made by the puller itself."""
        if same_host and open_leases < self._limits.busy_leases:
            return
        now_s = time.monotonic()
        num_hot = self._demand.note(ids, now_s)
        if num_hot and self._plan.is_due(ids[num_hot - 1], now_s):
            self._wish(ids[num_hot - 1], now_s)

    async def run(self) -> None:
        """Ask, one node after another."""
        while True:
            wish = await self._wishes.get()
            path = self._ram.path(wish.tip)[:MAX_COPY_BLOCKS]
            if path:
                await self._ask(wish.node, path)

    def _wish(self, tip: BlockId, now_s: float) -> None:
        nodes = {record.id: record for record in self._records.values() if record.kind == "kvstore"}
        path = [entry.block_id for entry in self._ram.path(tip)[:MAX_COPY_BLOCKS]] if len(nodes) > 1 else []
        if not path:
            return
        name = self._plan.next_node(path[0], path[-1], list(nodes), now_s)
        self._plan.asked(path, name, now_s, tip=tip)
        if name is None:
            return
        try:
            self._wishes.put_nowait(_Wish(path[-1], nodes[name]))
        except asyncio.QueueFull:
            self._totals.asked("dropped")

    async def _ask(self, node: LocationRecord, path: Sequence[Entry]) -> None:
        request = kvstore_pb2.ReplicateRequest(
            headers=[entry.header for entry in path],
            created_s=min(entry.created_s for entry in path),
            source_id=self._own.id,
            source_epoch=self._own.epoch,
            pull_address=self._own.pull_address,
            grpc_address=self._own.transfer_grpc_address,
        )
        try:
            async with open_channel(node.grpc_address) as channel:
                answer = await kvstore_pb2_grpc.KvStoreStub(channel).Replicate(
                    request, timeout=_ASK_TIMEOUT_S, metadata=call_metadata(self._secret)
                )
        except grpc.aio.AioRpcError as error:
            self._totals.asked("unreachable")
            _log.warning("a node could not be asked for a copy", kvstore_id=node.id, code=error.code().name)
            return
        outcome = answer.refused or ("held" if answer.held_blocks == len(path) else "accepted")
        self._totals.asked(outcome)
        _log.info(
            "asked for a copy", kvstore_id=node.id, blocks=len(path), held_blocks=answer.held_blocks, answer=outcome
        )
