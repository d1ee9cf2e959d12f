"""Launcher of causal attention over a paged KV pool: prefill chunks and decode tokens of one batch in one launch.

kernels/paged_attention.py is the specification, kernels/kv_quantisation.py that of quantised pools. A launch depends on
the batch's bounds and never on its values, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.kv_quantisation import is_quantised
from kernels.triton.attention_configs import (
    SPAN_TOKENS,
    AttentionConfig,
    Kind,
    attention_config,
    padded_dim,
    padded_rows,
)
from kernels.triton.attention_kernel import attend
from kernels.triton.attention_merge import merge
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.launch import architecture, has_fp8, num_processors

LOG2_E = 1.4426950408889634
# Programs that a processor runs at a time, by registers and shared memory of the configurations on sm_90.
RESIDENT_PROGRAMS: dict[Kind, int] = {"decode": 3, "prefill": 1, "exact": 1}
# A launch with so many rounds of programs is not split; otherwise it is where that fills the device better.
FULL_ROUNDS = 4
NEARLY = 0.9
MAX_SPLITS = 64
# A split is not shorter than this, and all partial sums of a launch are at most so large.
MIN_SPLIT_TILES = 4
MAX_PARTIAL_BYTES = 64 << 20
MERGE_WARPS = 4

KvFormat = Literal["plain", "e4m3", "int8"]
KV_FORMATS: dict[torch.dtype, KvFormat] = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Grid and workspace of a launch. splits 1: every program has its tile's whole context."""

    config: AttentionConfig
    one_tile: bool
    num_tiles: int
    splits: int
    spans: int


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: DeviceBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    exact: bool = False,
    kv_scales: torch.Tensor | None = None,
    splits: int | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """query [T, heads, head_dim]; pool [blocks, kv_heads, layers, 2, 16, head_dim], both contiguous.

    A plain pool has the query's dtype (float32, float16, bfloat16). A quantised one (float8_e4m3fn, int8) comes with
    kv_scales, float32 [blocks, kv_heads, layers, 2, 16]. Returns [T, heads, head_dim] in the query's dtype; 0 for the
    tokens of sequences of context 0; rows that no sequence owns are not written. exact: a row's result does not depend
    on the batch or on how prompts were cut. splits and config replace what would be chosen (tests, measurements).
    Raises ValueError for tensors that do not belong together.
    """
    _check(query, pool, kv_scales, scale)
    kv_heads, layers = pool.shape[1], pool.shape[2]
    tokens, heads, head_dim = query.shape
    plan = _plan(query, pool, batch, window, exact, splits, config)
    out = torch.empty_like(query)
    shape = (plan.spans, tokens, heads) if plan.splits > 1 else (0,)
    stats = query.new_empty((*shape, 2), dtype=torch.float32)
    sums = query.new_empty((*shape, head_dim), dtype=torch.float32)
    chosen = plan.config
    common = {
        "num_seqs": batch.num_seqs,
        "num_tokens": tokens,
        "num_splits": plan.splits,
        "window": window,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
        "BLOCK_N": chosen.block_n,
        "SPAN": SPAN_TOKENS if exact else 0,
        "MIN_TILES": MIN_SPLIT_TILES,
        "WINDOW": window > 0,
        "enable_fp_fusion": not exact,
    }
    attend[(kv_heads, plan.num_tiles, plan.splits)](
        query,
        out,
        pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool,
        kv_scales,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        stats,
        sums,
        layer=layer,
        layers=layers,
        kv_heads=kv_heads,
        num_tiles=plan.num_tiles,
        table_width=batch.block_tables.shape[1],
        score_scale=(softcap or scale) * LOG2_E,
        cap_scale=scale / softcap if softcap else 0.0,
        GROUP=heads // kv_heads,
        BLOCK_M=chosen.block_m,
        ONE_TILE=plan.one_tile,
        SPLIT=plan.splits > 1,
        SOFTCAP=softcap > 0,
        KV_FORMAT=KV_FORMATS.get(pool.dtype, "plain"),
        NATIVE_FP8=has_fp8(query.device),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **common,
    )
    if plan.splits > 1:
        merge[(tokens, heads)](
            out,
            batch.query_starts,
            batch.context_lens,
            stats,
            sums,
            BLOCK_Q=chosen.block_m // (heads // kv_heads),
            MAX_SPANS=MAX_SPLITS,
            num_warps=MERGE_WARPS,
            **common,
        )
    return out


def _plan(
    query: torch.Tensor,
    pool: torch.Tensor,
    batch: DeviceBatch,
    window: int,
    exact: bool,
    splits: int | None,
    config: AttentionConfig | None,
) -> _Plan:
    tokens, heads, head_dim = query.shape
    kv_heads = pool.shape[1]
    group = heads // kv_heads
    kind: Kind = "exact" if exact else "decode" if batch.max_query_len * group <= padded_rows(group) else "prefill"
    chosen = config or attention_config(
        kind, group, head_dim, query.dtype, architecture(query.device), quantised=is_quantised(pool.dtype)
    )
    tile_tokens = chosen.block_m // group
    one_tile = batch.max_query_len <= tile_tokens
    num_tiles = batch.num_seqs if one_tile else tokens // tile_tokens + batch.num_seqs
    seen = batch.max_context_len if not window else min(batch.max_context_len, window + tile_tokens)
    # A window may begin and end inside a span.
    exact_spans = -(-seen // SPAN_TOKENS) + (1 if window else 0)
    if splits is None:
        most = exact_spans if exact else min(MAX_SPLITS, -(-seen // (MIN_SPLIT_TILES * chosen.block_n)))
        splits = choose_splits(num_tiles * kv_heads, num_processors(query.device) * RESIDENT_PROGRAMS[kind], most)
    spans = exact_spans if exact else splits
    if spans * query.numel() * 4 > MAX_PARTIAL_BYTES:
        splits = 1
    return _Plan(chosen, one_tile, num_tiles, splits, spans)


def choose_splits(programs: int, resident: int, most: int) -> int:
    """How many programs share a tile's context, when `resident` run at a time and a tile has work for `most`.

    The fewest that keep the device nearly as full, averaged over the rounds, as any number would.
    """
    if programs >= FULL_ROUNDS * resident:
        return 1
    fill = [programs * splits / resident for splits in range(1, max(most, 1) + 1)]
    shares = [rounds / math.ceil(rounds) if rounds else 1.0 for rounds in fill]
    return next(splits for splits, share in enumerate(shares, 1) if share >= NEARLY * max(shares))


def _check(query: torch.Tensor, pool: torch.Tensor, kv_scales: torch.Tensor | None, scale: float) -> None:
    if query.shape[1] % pool.shape[1] or query.shape[2] != pool.shape[5]:
        raise ValueError(f"queries {tuple(query.shape)} over a pool {tuple(pool.shape)}")
    if is_quantised(pool.dtype) != (kv_scales is not None):
        raise ValueError(f"a pool of {pool.dtype} {'with' if kv_scales is not None else 'without'} scales")
    if kv_scales is not None and kv_scales.shape != pool.shape[:-1]:
        raise ValueError(f"scales {tuple(kv_scales.shape)} for a pool {tuple(pool.shape)}")
    if kv_scales is None and query.dtype != pool.dtype:
        raise ValueError(f"queries of {query.dtype} over a pool of {pool.dtype}")
    if not (query.is_contiguous() and pool.is_contiguous()) or scale <= 0:
        raise ValueError("queries and pool must be contiguous, the scale positive")
