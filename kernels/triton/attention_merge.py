"""The second kernel of paged attention, for launches that were split: joins the sums over a row's spans."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_spans import find_seq, fold, tile_bounds

MERGE_VARYING = ("num_seqs", "num_tokens", "num_splits", "window")


@triton.jit(do_not_specialize=MERGE_VARYING)
def merge(
    out: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    partial_stats: tl.tensor,
    partial_sums: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Grid (T, heads): one row's spans folded, in exact mode in order, otherwise, MAX_SPANS at most, at once."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    seq = find_seq(query_starts, token, num_seqs, 0)
    query_begin = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_begin
    if token - query_begin >= query_len:
        return
    _, _, end, base, span = tile_bounds(
        tl.load(context_lens + seq), query_len, (token - query_begin) // BLOCK_Q * BLOCK_Q, window, num_splits,
        BLOCK_Q, BLOCK_N, SPAN, MIN_TILES, WINDOW,
    )  # fmt: skip
    num_spans = tl.cdiv(end - base, span)
    dims = tl.arange(0, PADDED_DIM)
    row = token.to(tl.int64) * heads + head
    stride = num_tokens.to(tl.int64) * heads
    if SPAN == 0:
        spans = tl.arange(0, MAX_SPANS)
        at = row + spans * stride
        peaks = tl.load(partial_stats + at * 2, mask=spans < num_spans, other=float("-inf"))
        totals = tl.load(partial_stats + at * 2 + 1, mask=spans < num_spans, other=0.0)
        in_sums = (spans < num_spans)[:, None] & (dims < HEAD_DIM)[None, :]
        sums = tl.load(partial_sums + at[:, None] * HEAD_DIM + dims[None, :], mask=in_sums, other=0.0)
        peak = tl.max(peaks, 0)
        shrink = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
        total = tl.sum(totals * shrink, 0)
        result = tl.sum(sums * shrink[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    else:
        peak1 = tl.full([1], float("-inf"), tl.float32)
        total1 = tl.zeros([1], tl.float32)
        weighted1 = tl.zeros([1, PADDED_DIM], tl.float32)
        one = tl.arange(0, 1)
        for index in tl.range(0, num_spans):
            at = row + index * stride + one
            p = tl.load(partial_stats + at * 2)
            t = tl.load(partial_stats + at * 2 + 1)
            sums_at = partial_sums + at[:, None] * HEAD_DIM + dims[None, :]
            w = tl.load(sums_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            peak1, total1, weighted1 = fold(peak1, total1, weighted1, p, t, w)
        result = tl.reshape(weighted1 / tl.where(total1 > 0.0, total1, 1.0)[:, None], [PADDED_DIM])
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
