"""The Triton kernel of causal attention over a paged KV pool; paged_attention.py launches it.

One program takes one KV head and a tile of rows: BLOCK_M // GROUP query tokens of one sequence, each with the GROUP
query heads of that KV head. It walks the context in tiles of BLOCK_N tokens (any multiple of the page size, each page
found in the block table) with an online softmax in powers of two (Milakov and Gimelshein, 2018; Dao, 2023). Tiles that
every row sees whole are not masked; tiles that no row sees are not visited.

**Splitting.** Few rows leave the device empty: the context is then cut into spans that are computed apart (Dao et al.,
2023, "flash decoding") and folded by (maximum, sum, weighted values). The host chooses from bounds how many programs
share them; how long a span is each program finds from the sequence's true length.

**Exact mode.** A row's sums then depend on its position alone: one tile shape for every batch, spans of one length
from position 0, always folded in order, in registers where one program has them all, elsewhere by attention_merge.py.
A span or tile of which a row sees nothing leaves that row's sums as they are, to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_spans import find_seq, fold, tile_bounds
from kernels.triton.dot import dot
from kernels.triton.fp8 import from_e4m3

# Numbers of the batch or the model: kernels are not compiled anew for their values.
ATTEND_VARYING = (
    "layer", "layers", "kv_heads", "num_seqs", "num_tokens", "num_tiles", "num_splits", "table_width", "window",
)  # fmt: skip


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _attend_tiles(
    q: tl.tensor,
    positions: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    block_size: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,
    window: tl.tensor,
    score_scale: tl.tensor,
    cap_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
) -> tl.tensor:
    """Add the tiles from `begin`, a multiple of BLOCK_N, to before `end` to the running softmax of the rows."""
    WEIGHTS: tl.constexpr = tl.bfloat16 if KV_FORMAT != "plain" and q.dtype != tl.float32 else q.dtype
    dims = tl.arange(0, PADDED_DIM)
    offsets = tl.arange(0, BLOCK_N)
    # The pages of a tile are looked up one tile ahead.
    slots = tl.load(table + (begin + offsets >> 4), mask=begin + offsets < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        tokens = start + offsets
        if MASKED:
            inside = tokens < end
            if WINDOW:
                inside = inside & (tokens >= oldest)
        key_at = (pool + slots.to(tl.int64) * block_size + offsets % 16 * HEAD_DIM)[:, None] + dims[None, :]
        value_at = key_at + 16 * HEAD_DIM
        if PADDED_DIM != HEAD_DIM:
            k = tl.load(key_at, mask=(dims < HEAD_DIM)[None, :], other=0)
        else:
            k = tl.load(key_at)
        if MASKED and PADDED_DIM != HEAD_DIM:
            v = tl.load(value_at, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0)
        elif MASKED:
            v = tl.load(value_at, mask=inside[:, None], other=0)
        elif PADDED_DIM != HEAD_DIM:
            v = tl.load(value_at, mask=(dims < HEAD_DIM)[None, :], other=0)
        else:
            v = tl.load(value_at)
        # What a byte can say a float16 can; weights times scales want the range of a bfloat16.
        if KV_FORMAT == "e4m3":
            k = from_e4m3(k, NATIVE_FP8).to(q.dtype)
            v = from_e4m3(v, NATIVE_FP8).to(tl.float32).to(WEIGHTS)
        elif KV_FORMAT == "int8":
            k = k.to(q.dtype)
            v = v.to(tl.float32).to(WEIGHTS)
        scores = dot(q, tl.trans(k), tl.zeros([positions.shape[0], BLOCK_N], tl.float32))
        if KV_FORMAT != "plain":
            scale_at = scales + slots.to(tl.int64) * (block_size // HEAD_DIM) + offsets % 16
            if MASKED:
                key_scale = tl.load(scale_at, mask=inside, other=0.0)
                value_scale = tl.load(scale_at + 16, mask=inside, other=0.0)
            else:
                key_scale = tl.load(scale_at)
                value_scale = tl.load(scale_at + 16)
            scores = scores * key_scale[None, :]
        if SOFTCAP:
            scores = _tanh(scores * cap_scale)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (tokens[None, :] + window > positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
        finite = new_peak
        if MASKED:
            finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        # One rounding for the product and the difference, whatever the compiler would make of them.
        weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + score_scale, tl.zeros_like(scores) - finite[:, None]))
        shrink = tl.exp2(peak - finite)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        if KV_FORMAT != "plain":
            weights = weights * value_scale[None, :]
        weighted = weighted * shrink[:, None]
        weighted = dot(weights.to(WEIGHTS), v, weighted)
        peak = new_peak
        slots = tl.load(table + (tokens + BLOCK_N >> 4), mask=tokens + BLOCK_N < end, other=0)
    return peak, total, weighted


@triton.jit
def _attend_span(
    q: tl.tensor,
    positions: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    block_size: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    window: tl.tensor,
    score_scale: tl.tensor,
    cap_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
) -> tl.tensor:
    """The softmax sums of the rows over tokens `begin`, a multiple of BLOCK_N, to before `end`."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    oldest = position - window + 1
    masked_from = begin
    if not WINDOW:
        # Every row sees every token up to that of the first row.
        seen_whole = tl.minimum(position + 1, end) // BLOCK_N * BLOCK_N
        masked_from = tl.maximum(seen_whole, begin)
        peak, total, weighted = _attend_tiles(
            q, positions, peak, total, weighted, pool, scales, table, block_size, begin, masked_from, oldest,
            window, score_scale, cap_scale, HEAD_DIM, PADDED_DIM, BLOCK_N, False, WINDOW, SOFTCAP, KV_FORMAT,
            NATIVE_FP8,
        )  # fmt: skip
    return _attend_tiles(
        q, positions, peak, total, weighted, pool, scales, table, block_size, masked_from, end, oldest,
        window, score_scale, cap_scale, HEAD_DIM, PADDED_DIM, BLOCK_N, True, WINDOW, SOFTCAP, KV_FORMAT, NATIVE_FP8,
    )  # fmt: skip


@triton.jit(do_not_specialize=ATTEND_VARYING)
def attend(
    query: tl.tensor,
    out: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    partial_stats: tl.tensor,
    partial_sums: tl.tensor,
    layer: tl.tensor,
    layers: tl.tensor,
    kv_heads: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    num_splits: tl.tensor,
    table_width: tl.tensor,
    window: tl.tensor,
    score_scale: tl.tensor,
    cap_scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
) -> None:
    """Grid (kv_heads, num_tiles, num_splits). ONE_TILE: a tile is a sequence, and holds all its query tokens.

    score_scale: of what is an exponent of two; cap_scale: of scores before the soft cap. SPAN: tokens of a span in
    exact mode, otherwise 0. SPLIT: sums go to partial_stats [spans, T, heads, 2] and partial_sums [spans, T, heads,
    HEAD_DIM], not to `out`. KV_FORMAT: plain, e4m3 (bytes) or int8, these with
    scales. NATIVE_FP8: the device has the type.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # Late tiles see the longest contexts: they start first, the short ones fill the gaps at the end.
    tile = num_tiles - 1 - tl.program_id(1)
    split = tl.program_id(2)
    if ONE_TILE:
        seq = tile
        query_begin = tl.load(query_starts + seq)
        first = tile * 0
    else:
        seq = find_seq(query_starts, tile, num_seqs, BLOCK_Q)
        query_begin = tl.load(query_starts + seq)
        first = (tile - (query_begin // BLOCK_Q + seq)) * BLOCK_Q
    query_len = tl.load(query_starts + seq + 1) - query_begin
    if first >= query_len:
        return
    context = tl.load(context_lens + seq)
    position, begin, end, base, span = tile_bounds(
        context, query_len, first, window, num_splits, BLOCK_Q, BLOCK_N, SPAN, MIN_TILES, WINDOW
    )
    num_spans = tl.cdiv(end - base, span)
    if SPLIT and split >= num_spans:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    valid = (rows < BLOCK_Q * GROUP) & (first + rows // GROUP < query_len)
    positions = tl.where(valid, position + rows // GROUP, -1)
    # Of the tile's first row; the others are near it.
    heads = kv_heads * GROUP
    row0 = (query_begin + first).to(tl.int64) * heads + kv_head * GROUP
    row_at = rows // GROUP * heads + rows % GROUP
    in_tile = row_at[:, None] * HEAD_DIM + dims[None, :]
    in_head = valid[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + row0 * HEAD_DIM + in_tile, mask=in_head, other=0.0)
    if KV_FORMAT != "plain" and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    table = block_tables + seq.to(tl.int64) * table_width
    plane = (kv_head * layers + layer).to(tl.int64) * (2 * 16)
    pool += plane * HEAD_DIM
    if KV_FORMAT != "plain":
        scales += plane
    block_size = kv_heads * layers * (2 * 16 * HEAD_DIM)

    if SPLIT:
        stride = num_tokens.to(tl.int64) * heads
        # In exact mode a program may have several spans, which must be folded one by one.
        for index in tl.range(split, num_spans, num_splits, num_stages=1):
            p, t, w = _attend_span(
                q, positions, pool, scales, table, block_size, tl.maximum(base + index * span, begin),
                tl.minimum(base + (index + 1) * span, end), position, window, score_scale, cap_scale,
                HEAD_DIM, PADDED_DIM, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, KV_FORMAT, NATIVE_FP8,
            )  # fmt: skip
            at = index * stride + row0
            tl.store(partial_stats + at * 2 + row_at * 2, p, mask=valid)
            tl.store(partial_stats + at * 2 + row_at * 2 + 1, t, mask=valid)
            tl.store(partial_sums + at * HEAD_DIM + in_tile, w, mask=in_head)
    else:
        if SPAN == 0:
            peak, total, weighted = _attend_span(
                q, positions, pool, scales, table, block_size, begin, end, position, window, score_scale,
                cap_scale, HEAD_DIM, PADDED_DIM, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, KV_FORMAT, NATIVE_FP8,
            )  # fmt: skip
        else:
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            weighted = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
            for index in tl.range(0, num_spans, num_stages=1):
                p, t, w = _attend_span(
                    q, positions, pool, scales, table, block_size, tl.maximum(base + index * span, begin),
                    tl.minimum(base + (index + 1) * span, end), position, window, score_scale, cap_scale,
                    HEAD_DIM, PADDED_DIM, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, KV_FORMAT, NATIVE_FP8,
                )  # fmt: skip
                peak, total, weighted = fold(peak, total, weighted, p, t, w)
        result = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + row0 * HEAD_DIM + in_tile, result.to(out.dtype.element_ty), mask=in_head)
