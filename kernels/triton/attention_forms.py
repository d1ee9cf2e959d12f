"""The shipped forms of paged attention: every launch configuration, with the features that models and pools have."""

from __future__ import annotations

import torch

from kernels.triton.attention_configs import SPAN_TOKENS, Kind, attention_config, padded_dim
from kernels.triton.attention_kernel import ATTEND_VARYING, attend
from kernels.triton.attention_merge import MERGE_VARYING, merge
from kernels.triton.paged_attention import MAX_SPLITS, MERGE_WARPS, MIN_SPLIT_TILES, KvFormat
from kernels.triton.registry import KernelConfig, pointer

# Multiples of 16 bytes by contract: tensors of the caching allocator, and the parts of a DeviceBatch.
_ALIGNED = ("query", "out", "pool", "query_starts", "context_lens", "block_tables", "partial_stats", "partial_sums")
_KV_TYPES = {"e4m3": "*u8", "int8": "*i8"}


def attend_form(
    kind: Kind,
    architecture: int,
    head_dim: int,
    group: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv: KvFormat = "plain",
    split: bool = False,
    window: bool = False,
    softcap: bool = False,
) -> KernelConfig:
    """One form of the attention kernel, for queries of `dtype`, as paged_attention would launch it."""
    chosen = attention_config(kind, group, head_dim, dtype, architecture, quantised=kv != "plain")
    marks = [word for word, on in (("split", split), ("window", window), ("softcap", softcap)) if on]
    name = "-".join(["attend", kind, pointer(dtype)[1:], kv, f"d{head_dim}", f"g{group}", *marks, f"sm{architecture}"])
    return KernelConfig(
        name=name,
        kernel=attend,
        signature={
            **dict.fromkeys(("query", "out"), pointer(dtype)),
            "pool": _KV_TYPES.get(kv, pointer(dtype)),
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
            "SPAN": SPAN_TOKENS if kind == "exact" else 0,
            "MIN_TILES": MIN_SPLIT_TILES,
            "ONE_TILE": kind == "decode" or split,
            "SPLIT": split,
            "WINDOW": window,
            "SOFTCAP": softcap,
            "KV_FORMAT": kv,
            "NATIVE_FP8": architecture >= 89,
        },
        aligned=_ALIGNED,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        options={"enable_fp_fusion": kind != "exact"},
        architectures=(architecture,),
    )


def _merge_form(head_dim: int, exact: bool) -> KernelConfig:
    return KernelConfig(
        name=f"merge-{'exact' if exact else 'splits'}-bf16-d{head_dim}",
        kernel=merge,
        signature={
            "out": "*bf16",
            **dict.fromkeys(("query_starts", "context_lens"), "*i32"),
            **dict.fromkeys(("partial_stats", "partial_sums"), "*fp32"),
            **dict.fromkeys(MERGE_VARYING, "i32"),
        },
        constants={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded_dim(head_dim),
            "BLOCK_Q": 4,
            "BLOCK_N": 64,
            "SPAN": SPAN_TOKENS if exact else 0,
            "MIN_TILES": MIN_SPLIT_TILES,
            "MAX_SPANS": MAX_SPLITS,
            "WINDOW": False,
        },
        aligned=("out", "query_starts", "context_lens", "partial_stats", "partial_sums"),
        num_warps=MERGE_WARPS,
        options={"enable_fp_fusion": not exact},
    )


def _forms(architecture: int) -> list[KernelConfig]:
    return [
        attend_form("decode", architecture, 128, 4, split=True),
        attend_form("decode", architecture, 64, 3),
        attend_form("decode", architecture, 256, 2, softcap=True),
        attend_form("decode", architecture, 128, 4, kv="e4m3", split=True),
        attend_form("decode", architecture, 128, 4, kv="int8", split=True),
        attend_form("prefill", architecture, 128, 4),
        attend_form("prefill", architecture, 64, 3),
        attend_form("prefill", architecture, 96, 1, window=True),
        attend_form("prefill", architecture, 256, 2, softcap=True, window=True),
        attend_form("prefill", architecture, 256, 2, softcap=True),
        attend_form("prefill", architecture, 128, 4, kv="e4m3"),
        attend_form("prefill", architecture, 128, 4, kv="int8"),
        attend_form("prefill", architecture, 64, 3, dtype=torch.float32),
        attend_form("exact", architecture, 128, 4),
        attend_form("exact", architecture, 128, 4, split=True),
        attend_form("exact", architecture, 64, 3),
        attend_form("exact", architecture, 256, 2),
    ]


SHIPPED = [*_forms(80), *_forms(90), _merge_form(128, False), _merge_form(256, False), _merge_form(128, True)]
