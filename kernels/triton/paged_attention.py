"""Launcher of causal attention over a paged KV pool: prefill chunks and decode tokens of one batch in one launch.

kernels/paged_attention.py is the specification, kernels/kv_quantisation.py that of quantised pools. A launch depends on
the batch's bounds and never on its values, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.kv_quantisation import is_quantised
from kernels.triton.attention_configs import SPAN_TOKENS, AttentionConfig, Kind, attention_config, padded_dim
from kernels.triton.attention_kernel import ATTEND_VARYING, attend, merge
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.launch import num_processors
from kernels.triton.registry import KernelConfig, pointer

LOG2_E = 1.4426950408889634
# A launch is split when it has fewer programs than this for each processor.
FULL_PROGRAMS = 2
MAX_SPLITS = 64
# A split is not shorter than this, and all partial sums of a launch are at most so large.
MIN_SPLIT_TILES = 4
MAX_PARTIAL_BYTES = 64 << 20

KvFormat = Literal["plain", "e4m3", "int8"]
KV_FORMATS: dict[torch.dtype, KvFormat] = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}
# Multiples of 16 bytes by contract: tensors of the caching allocator, and the parts of a DeviceBatch.
ALIGNED = ("query", "out", "pool", "query_starts", "context_lens", "block_tables", "partial_stats", "partial_sums")


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
    plan = _plan(query, kv_heads, batch, window, exact, splits, config)
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
            num_warps=4,
            **common,
        )
    return out


def _plan(
    query: torch.Tensor,
    kv_heads: int,
    batch: DeviceBatch,
    window: int,
    exact: bool,
    splits: int | None,
    config: AttentionConfig | None,
) -> _Plan:
    tokens, heads, head_dim = query.shape
    group = heads // kv_heads
    kind: Kind = "exact" if exact else "decode" if batch.max_query_len * group <= _decode_rows(group) else "prefill"
    chosen = config or attention_config(kind, group, head_dim, query.dtype)
    tile_tokens = chosen.block_m // group
    one_tile = batch.max_query_len <= tile_tokens
    num_tiles = batch.num_seqs if one_tile else tokens // tile_tokens + batch.num_seqs
    seen = batch.max_context_len if not window else min(batch.max_context_len, window + tile_tokens)
    programs = num_tiles * kv_heads
    if splits is None:
        wanted = -(-FULL_PROGRAMS * num_processors(query.device) // programs) if programs else 1
        longest = SPAN_TOKENS if exact else MIN_SPLIT_TILES * chosen.block_n
        splits = min(wanted, MAX_SPLITS, -(-seen // longest))
    # A window may begin and end inside a span.
    spans = -(-seen // SPAN_TOKENS) + (1 if window else 0) if exact else splits
    if splits * programs < 1 or spans * query.numel() * 4 > MAX_PARTIAL_BYTES:
        splits = 1
    return _Plan(chosen, one_tile, num_tiles, max(splits, 1), spans)


def _decode_rows(group: int) -> int:
    """Rows up to which a sequence's query tokens are decoded as one small tile."""
    return max(16, 1 << (group - 1).bit_length())


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


def _form(
    kind: Kind,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    kv: KvFormat = "plain",
    split: bool = False,
    window: bool = False,
    softcap: bool = False,
) -> KernelConfig:
    chosen = attention_config(kind, group, head_dim, dtype)
    exact = kind == "exact"
    kv_type = {"plain": pointer(dtype), "e4m3": "*u8", "int8": "*i8"}[kv]
    marks = [word for word, on in (("split", split), ("window", window), ("softcap", softcap)) if on]
    name = "-".join(["attend", kind, pointer(dtype)[1:], kv, f"d{head_dim}", f"g{group}", *marks])
    return KernelConfig(
        name=name,
        kernel=attend,
        signature={
            **dict.fromkeys(("query", "out"), pointer(dtype)),
            "pool": kv_type,
            **({} if kv == "plain" else {"scales": "*fp32"}),
            **dict.fromkeys(("query_starts", "context_lens", "block_tables"), "*i32"),
            **dict.fromkeys(("partial_stats", "partial_sums"), "*fp32"),
            **dict.fromkeys(ATTEND_VARYING, "i32"),
            **dict.fromkeys(("score_scale", "cap_scale"), "fp32"),
        },
        constants={
            **({"scales": None} if kv == "plain" else {}),
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded_dim(head_dim),
            "BLOCK_M": chosen.block_m,
            "BLOCK_N": chosen.block_n,
            "SPAN": SPAN_TOKENS if exact else 0,
            "MIN_TILES": MIN_SPLIT_TILES,
            "ONE_TILE": kind == "decode" or split,
            "SPLIT": split,
            "WINDOW": window,
            "SOFTCAP": softcap,
            "KV_FORMAT": kv,
        },
        aligned=ALIGNED,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        options={"enable_fp_fusion": not exact},
    )


_BF16 = torch.bfloat16
SHIPPED = [
    _form("decode", _BF16, 128, 4, split=True),
    _form("decode", _BF16, 64, 3),
]
