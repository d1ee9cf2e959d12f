"""Rotary embedding (Su et al., 2021) in the half-split form, and the write of keys and values into the paged pool."""

from __future__ import annotations

import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch


def rotary_table(inverse_frequencies: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [num_positions, head_dim / 2], of each position times each inverse frequency."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse_frequencies.double())
    return angles.cos().float(), angles.sin().float()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads float32 [T, n, head_dim], cos and sin [T, head_dim / 2]; element i turns with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_write(
    qkv: torch.Tensor,
    batch: PagedBatch,
    *,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Write each token's rotated keys and its values to the pool; return its rotated queries.

    qkv float32 [T, (heads + 2 * kv_heads) * head_dim]; cos, sin [positions, head_dim / 2]; pool
    [blocks, kv_heads, layers, 2, 16, head_dim]. Returns [T, heads, head_dim] in the pool's dtype.
    """
    kv_heads, head_dim = pool.shape[1], pool.shape[-1]
    positions = torch.from_numpy(batch.positions).long()
    rows = qkv.view(len(qkv), -1, head_dim)
    query, key, value = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos[positions], sin[positions]
    slots = batch.token_tables.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0]
    pool[slots, :, layer, 0, positions % BLOCK_TOKENS] = rotate(key, cos, sin).to(pool.dtype)
    pool[slots, :, layer, 1, positions % BLOCK_TOKENS] = value.to(pool.dtype)
    return rotate(query, cos, sin).to(pool.dtype)
