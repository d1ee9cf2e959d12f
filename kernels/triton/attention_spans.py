"""What the kernels of paged attention must agree on: whose a tile is, which spans it has, and how spans are joined."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_seq(query_starts: tl.tensor, wanted: tl.tensor, num_seqs: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The last sequence whose first tile, query_starts[s] // BLOCK_Q + s, is not after `wanted`; first token for 0."""
    low = wanted * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts + middle)
        if BLOCK_Q > 0:
            first = first // BLOCK_Q + middle
        if first <= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def tile_bounds(
    context: tl.tensor,
    query_len: tl.tensor,
    first: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Of the rows of query tokens `first` ..: position of the first, begin and end of what they see, base and length of
    spans. begin and base are multiples of BLOCK_N."""
    position = context - query_len + first
    end = tl.minimum(context, position + BLOCK_Q)
    begin = position * 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPAN > 0:
        base = begin // SPAN * SPAN
        span = begin * 0 + SPAN
    else:
        base = begin
        tiles = tl.cdiv(end - begin, BLOCK_N)
        span = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES) * BLOCK_N
    return position, begin, end, base, span


@triton.jit
def fold(
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    span_peak: tl.tensor,
    span_total: tl.tensor,
    span_weighted: tl.tensor,
) -> tl.tensor:
    """The sums over a span joined to those before it. Every rounding is written out: both kernels must do the same."""
    new_peak = tl.maximum(peak, span_peak)
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    before = tl.exp2(peak - finite)
    after = tl.exp2(span_peak - finite)
    total = tl.fma(span_total, after, total * before)
    weighted = tl.fma(span_weighted, after[:, None] + tl.zeros_like(weighted), weighted * before[:, None])
    return new_peak, total, weighted
