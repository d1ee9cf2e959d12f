"""Rotary embedding (Su et al., 2021) in the half-split form, and the write of keys and values into the paged pool.

Heads of queries and keys may be normalised before they turn (Qwen3, Gemma 3), and may turn in their first part only.
"""

from __future__ import annotations

import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch
from kernels.rms_norm import rms_norm


def rotary_table(
    inverse_frequencies: torch.Tensor, num_positions: int, *, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position times each inverse frequency, times `factor`.

    float32 [num_positions, rotary_dim / 2].
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse_frequencies.double())
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads float32 [T, n, head_dim], cos and sin [T, rotary_dim / 2].

    Of the first rotary_dim elements i turns with i + rotary_dim / 2; the rest of a head passes unturned.
    """
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotary_write(
    qkv: torch.Tensor,
    batch: PagedBatch,
    *,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Write each token's rotated keys and its values to the pool; return its rotated queries.

    qkv float32 [T, (heads + 2 * kv_heads) * head_dim]; cos, sin [positions, rotary_dim / 2]; pool
    [blocks, kv_heads, layers, 2, 16, head_dim]. q_norm, k_norm: float32 [head_dim] weights of an RMS normalisation of
    every head before it turns. Returns [T, heads, head_dim] in the pool's dtype.
    """
    kv_heads, head_dim = pool.shape[1], pool.shape[-1]
    positions = torch.from_numpy(batch.positions).long()
    rows = qkv.view(len(qkv), -1, head_dim)
    query, key, value = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
    query, key = _normalised(query, q_norm, eps), _normalised(key, k_norm, eps)
    cos, sin = cos[positions], sin[positions]
    slots = batch.token_tables.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0]
    pool[slots, :, layer, 0, positions % BLOCK_TOKENS] = rotate(key, cos, sin).to(pool.dtype)
    pool[slots, :, layer, 1, positions % BLOCK_TOKENS] = value.to(pool.dtype)
    return rotate(query, cos, sin).to(pool.dtype)


def _normalised(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return heads if weight is None else rms_norm(heads, weight, eps=eps, dtype=torch.float32)
