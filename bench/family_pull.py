"""A real pull between two KV pools: the bytes of blocks go through the mesh's transfer protocol over UCX.

One side lends blocks of its pool with the headers that a worker makes, the other pulls them into slots of its own and
verifies every header and every head's checksum before the blocks count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.blocks import BlockId, chain_block_ids
from services.common.security import MeshSecret
from services.common.transfer.endpoint import TransferEndpoint
from services.common.transfer.errors import PeerLost
from services.common.transfer.header import UNKNOWN_PARENT, BlockFormat, Segment, make_header, verify_block
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    BlockLease,
    HeldBlock,
    PeerAddress,
    PullRequest,
    Reservation,
)
from services.worker.model.kv_pool import PoolBuffer
from services.worker.model.runner import CpuRunner

_SECRET = MeshSecret("a secret for the families")
_KEY = bytes(32)
_DEADLINE_S = 30.0
_ATTEMPTS = 10


@dataclass(frozen=True)
class Pool:
    """A runner and the memory that its blocks lie in."""

    runner: CpuRunner
    memory: PoolBuffer

    def block(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        size = self.runner.spec.layout.block_bytes
        return memoryview(self.memory)[slot * size : (slot + 1) * size]

    @property
    def block_format(self) -> BlockFormat:
        """What headers of its blocks say."""
        layout = self.runner.spec.layout
        segment = Segment(0, layout.num_layers, layout.block_shape, layout.dtype)
        return BlockFormat(self.runner.spec.digest, layout.dtype, layout.num_kv_heads, layout.block_bytes, (segment,))


@dataclass(frozen=True)
class _Lease:
    blocks: Sequence[HeldBlock]
    stop: str = STOP_COMPLETE

    def release(self, num_sent: int, stop: str) -> None:
        """Nothing is evicted here."""


class _Source:
    """Lends the blocks of one prompt; keeps none."""

    def __init__(self, pool: Pool, ids: Sequence[BlockId], slots: Sequence[int]) -> None:
        self._held = {}
        for index, (block_id, slot) in enumerate(zip(ids, slots, strict=True)):
            parent = ids[index - 1] if index else UNKNOWN_PARENT
            payload = pool.block(slot)
            header = make_header(pool.block_format, block_id, payload, parent_id=parent, starts_chain=index == 0)
            self._held[block_id] = HeldBlock(header, payload, "hbm")

    async def lease(self, request: PullRequest) -> BlockLease:
        return _Lease([self._held[block_id] for block_id in request.ids])

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> Reservation:
        raise NotImplementedError("nobody pushes here")


async def pull_blocks(holder: Pool, slots: Sequence[int], puller: Pool, target_slots: Sequence[int]) -> None:
    """Bring blocks of `holder` into slots of `puller`. Raises BlockInvalid or TransferError."""
    ids = chain_block_ids(_KEY, BlockId(bytes(16)), np.arange(16 * len(slots), dtype=np.uint32))
    source = _Source(holder, ids, slots)
    endpoint = TransferEndpoint("ucx", _SECRET, source, source, max_operation_s=_DEADLINE_S)
    buffers = [puller.block(slot) for slot in target_slots]
    headers: list[bytes] = []
    try:
        peer = PeerAddress(endpoint.listen("127.0.0.1:0"), "")
        result = await endpoint.transport.pull(
            peer, PullRequest(ids, 0, _DEADLINE_S), buffers, lambda index, header, tier: headers.append(header)
        )
        if result.num_blocks != len(ids):
            raise RuntimeError(f"{result.num_blocks} of {len(ids)} blocks came: {result.stop}")
        for block_id, header, buffer in zip(ids, headers, buffers, strict=True):
            verify_block(header, buffer, block_id, puller.block_format)
    finally:
        await endpoint.close()


def pull_now(holder: Pool, slots: Sequence[int], puller: Pool, target_slots: Sequence[int]) -> None:
    """`pull_blocks` in a loop of its own; again where a busy machine missed the short deadline of a handshake."""
    for attempt in range(_ATTEMPTS):
        try:
            asyncio.run(pull_blocks(holder, slots, puller, target_slots))
        except PeerLost:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return
