"""Quantised KV pools: one float32 scale for each token of each head, layer, and of keys and of values.

pool [blocks, kv_heads, layers, 2, 16, head_dim] in FP8 e4m3 or INT8, scales float32 [blocks, kv_heads, layers, 2, 16].
An element stands for itself times its scale. These are the references of what kernels write and read.
"""

from __future__ import annotations

import torch

from kernels.batch import PagedBatch
from kernels.paged_attention import paged_attention

# The largest number of each format; the largest element of a row becomes it.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype has scales."""
    return dtype in LARGEST


def quantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., head_dim] as `dtype` and float32 scales [...]. Nearest, ties to even; zeros have scale 1."""
    peak = rows.abs().amax(-1)
    scales = torch.where(peak > 0, peak / LARGEST[dtype], 1.0)
    scaled = rows / scales[..., None]
    if dtype == torch.int8:
        scaled = scaled.round().clamp(-127, 127)
    return scaled.to(dtype), scales


def dequantise(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_dim]."""
    return quantised.float() * scales[..., None]


def quantised_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """paged_attention over a quantised pool, in float32; query [T, heads, head_dim], result in the query's dtype."""
    plain = dequantise(pool, scales)
    found = paged_attention(query.float(), plain, layer, batch, scale=scale, window=window, softcap=softcap)
    return found.to(query.dtype)
