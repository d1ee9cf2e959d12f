"""Launch configurations of paged attention, stored by kind of launch, head dimension and KV format.

decode: few rows, one tile per sequence; what counts is bytes in flight. prefill: many rows; what counts is the tensor
cores. exact: one shape for both, so that a row meets the same instructions whatever is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["decode", "prefill", "exact"]

# Tokens after which exact mode restarts its sums. A multiple of every BLOCK_N.
SPAN_TOKENS = 1024
MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Rows and tokens of a tile, warps of a program, stages of loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_F32 = {
    "decode": AttentionConfig(16, 32, 4, 2),
    "prefill": AttentionConfig(32, 32, 4, 2),
    "exact": AttentionConfig(16, 32, 4, 2),
}
# By kind and padded head dimension; 16-bit queries.
_TABLE: dict[tuple[Kind, int], AttentionConfig] = {
    ("decode", 64): AttentionConfig(16, 128, 4, 3),
    ("decode", 128): AttentionConfig(16, 64, 4, 3),
    ("decode", 256): AttentionConfig(16, 32, 4, 3),
    ("prefill", 64): AttentionConfig(128, 64, 4, 3),
    ("prefill", 128): AttentionConfig(128, 64, 8, 3),
    ("prefill", 256): AttentionConfig(64, 32, 8, 2),
    ("exact", 64): AttentionConfig(64, 64, 4, 3),
    ("exact", 128): AttentionConfig(64, 64, 4, 2),
    ("exact", 256): AttentionConfig(64, 32, 8, 2),
}


def attention_config(kind: Kind, group: int, head_dim: int, dtype: torch.dtype) -> AttentionConfig:
    """The configuration for a launch with queries of `dtype`; never fewer rows than one token's heads."""
    found = _F32[kind] if dtype == torch.float32 else _TABLE[kind, padded_dim(head_dim)]
    rows = max(found.block_m, 1 << (group - 1).bit_length())
    return AttentionConfig(rows, found.block_n, found.num_warps, found.num_stages)


def padded_dim(head_dim: int) -> int:
    """The power of two that a head's vectors are padded to in registers, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())
