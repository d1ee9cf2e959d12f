"""Blocks between the paged pool and the transfer layout: the specification, in plain torch.

A block in flight is one run of bytes, KV head after KV head: `[layer][k|v][token][head_dim]` in the pool's dtype, and
where the pool is quantised then the head's scales `[layer][k|v][token]` in float32. So the share of a range of heads is
contiguous, and one checksum covers a head with its scales. A header says this as two segments of a block, of shapes
[kv_heads, layers, 2, 16, head_dim] and [kv_heads, layers, 2, 16]: what a head has of each stands together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.batch import BLOCK_TOKENS

SCALE_BYTES = 4


def head_bytes(pool: torch.Tensor, kv_scales: torch.Tensor | None = None) -> int:
    """Bytes of one KV head of a block in flight; pool [blocks, kv_heads, layers, 2, 16, head_dim]."""
    layers, head_dim = pool.shape[2], pool.shape[5]
    scales = 0 if kv_scales is None else SCALE_BYTES
    return layers * 2 * BLOCK_TOKENS * (head_dim * pool.element_size() + scales)


def gather_blocks(
    pool: torch.Tensor,
    slots: torch.Tensor,
    staging: torch.Tensor,
    *,
    first_head: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Copy blocks out of the pool. slots int32 [n], -1: nothing is copied; staging uint8 [n, heads * head_bytes].

    As many heads from `first_head` on as the staging's rows hold.
    """
    for pooled, staged in _pairs(pool, slots, staging, first_head, kv_scales):
        staged.copy_(pooled)


def scatter_blocks(
    pool: torch.Tensor,
    slots: torch.Tensor,
    staging: torch.Tensor,
    *,
    first_head: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Copy blocks into the pool, the reverse of gather_blocks. No slot may be there twice."""
    for pooled, staged in _pairs(pool, slots, staging, first_head, kv_scales):
        pooled.copy_(staged)


def _pairs(
    pool: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor, first_head: int, kv_scales: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes in the pool and in flight that belong together."""
    for row, slot in zip(staging, slots.tolist(), strict=True):
        if slot < 0:
            continue
        for head, part in enumerate(row.view(-1, head_bytes(pool, kv_scales)), first_head):
            data = pool[slot, head].view(torch.uint8).flatten()
            yield data, part[: len(data)]
            if kv_scales is not None:
                yield kv_scales[slot, head].view(torch.uint8).flatten(), part[len(data) :]
