"""Causal attention of a mixed batch over a paged KV pool: the specification, in plain torch.

Each query token sums its context in tiles of 64 tokens from position 0 with an online softmax (Milakov and Gimelshein,
2018), so its result depends on its position alone; a window hides what is too old and moves no tile. Weights are
rounded to the KV dtype before they meet the values, sums are float32. The compiled kernels must agree within rounding.
"""

from __future__ import annotations

import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch

TILE_TOKENS = 64


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """query [T, heads, head_dim] in the pool's dtype; pool [blocks, kv_heads, layers, 2, 16, head_dim].

    The KV of the step's own tokens is already in the pool. A token sees the `window` latest positions, itself included;
    0: all. softcap: scores become softcap * tanh(score / softcap); 0: they stay. Returns [T, heads, head_dim] in the
    pool's dtype. Pool contents that no token sees may be anything, NaN included.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = pool.shape[1]
    grouped = query.float().view(tokens * kv_heads, heads // kv_heads, head_dim)
    last = torch.from_numpy(batch.positions).long()
    peak = torch.full((tokens * kv_heads, heads // kv_heads, 1), -torch.inf)
    total = torch.zeros_like(peak)
    weighted = torch.zeros_like(grouped)
    for start in range(_first_tile(last, window), int(batch.context_lens.max()), TILE_TOKENS):
        keys, values, visible = _gather_tile(pool, layer, batch.token_tables, last, start, window)
        scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet keeps its zeros.
        finite_peak = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weights = torch.exp(scores - finite_peak)
        shrink = torch.exp(peak - finite_peak)
        total = total * shrink + weights.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.bmm(weights.to(pool.dtype).float(), values)
        peak = new_peak
    return (weighted / total).view(tokens, heads, head_dim).to(pool.dtype)


def _first_tile(last: torch.Tensor, window: int) -> int:
    """Where the first tile starts that any row sees; tiles before it would leave every sum as it is."""
    oldest = int(last.min()) - window + 1 if window else 0
    return max(oldest, 0) // TILE_TOKENS * TILE_TOKENS


def _gather_tile(
    pool: torch.Tensor, layer: int, tables: torch.Tensor, last: torch.Tensor, start: int, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values, float32 [T * kv_heads, 64, head_dim], zero where unseen; what is seen, [T * kv_heads, 1, 64]."""
    kv_heads, head_dim = pool.shape[1], pool.shape[-1]
    wanted = torch.arange(start // BLOCK_TOKENS, (start + TILE_TOKENS) // BLOCK_TOKENS)
    slots = tables[:, wanted.clamp(max=tables.shape[1] - 1)]
    tile = pool[slots, :, layer].float()  # [T, 4, kv_heads, 2, 16, head_dim]
    tile = tile.permute(3, 0, 2, 1, 4, 5).reshape(2, -1, TILE_TOKENS, head_dim)
    behind = last[:, None] - torch.arange(start, start + TILE_TOKENS)
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    visible = seen.repeat_interleave(kv_heads, 0)
    tile = tile.masked_fill(~visible[None, :, :, None], 0.0)
    return tile[0], tile[1], visible[:, None, :]
