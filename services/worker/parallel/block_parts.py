"""Blocks of a spread group: every rank has its heads and layers of them in a pool of its own.

Pool slots have the same numbers everywhere. On their way from and to other processes blocks are put together in rank
0's staging area (staging.py), and taken apart there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.block_transfers import Copy
from services.worker.model.kv_pool import TORCH_DTYPES
from services.worker.model.layout import KvLayout
from services.worker.model.shard import Shard
from services.worker.parallel.step_frames import ByteArray
from services.worker.parallel.step_link import StepLink


@dataclass(frozen=True, slots=True)
class _Together:
    copies: tuple[Copy, ...]

    def is_done(self) -> bool:
        """See Copy."""
        return all(copy.is_done() for copy in self.copies)


class PartCopier:
    """BlockCopier of rank 0 between all ranks' pools and staging. Raises RankLost, and so do its copies."""

    def __init__(
        self, pool: torch.Tensor, shard: Shard, links: Sequence[StepLink], staging: torch.Tensor, layout: KvLayout
    ) -> None:
        """pool: rank 0's own, [blocks, its kv_heads, its layers, 2, 16, head_dim]. shard: rank 0's. links: to the
        others in their order. staging: uint8 [slots, block_bytes] for blocks of `layout`.
        """
        blocks = staging.view(TORCH_DTYPES[layout.dtype]).view(len(staging), *layout.block_shape)
        self._pool = pool
        self._own = _part(blocks, shard)
        ranks = range(1, shard.parallelism.num_ranks)
        others = [_part(blocks, Shard(shard.whole, shard.parallelism, rank)) for rank in ranks]
        self._others = list(zip(links, others, strict=True))

    def gather(self, pool_slots: Sequence[int], staging_slots: Sequence[int]) -> Copy:
        """See BlockCopier."""
        slots = torch.tensor(staging_slots)
        self._own[slots] = self._pool[torch.tensor(pool_slots)]
        return _Together(tuple(_gather(link, pool_slots, part, slots) for link, part in self._others))

    def scatter(self, staging_slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
        """See BlockCopier."""
        slots = torch.tensor(staging_slots)
        self._pool[torch.tensor(pool_slots)] = self._own[slots]
        return _Together(tuple(link.scatter(pool_slots, as_bytes(part[slots]).data) for link, part in self._others))


def as_bytes(parts: torch.Tensor) -> ByteArray:
    """The memory of a contiguous tensor."""
    array: ByteArray = parts.view(-1).view(torch.uint8).numpy()
    return array


def _part(blocks: torch.Tensor, shard: Shard) -> torch.Tensor:
    heads, layers = shard.kv_heads, shard.layers
    return blocks[:, heads.start : heads.stop, layers.start : layers.stop]


def _gather(link: StepLink, pool_slots: Sequence[int], part: torch.Tensor, slots: torch.Tensor) -> Copy:
    come = torch.empty(len(slots), *part.shape[1:], dtype=part.dtype)

    def take() -> None:
        part[slots] = come

    return link.gather(pool_slots, as_bytes(come).data, take)
