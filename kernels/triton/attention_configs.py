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
# Rows of the smallest product of matrices.
MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Rows and tokens of a tile, warps of a program, stages of loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kind and padded head dimension, for 16-bit queries; measured on no device yet, chosen by registers (no spills),
# shared memory (decode: three programs fit a processor of sm_90) and loads in flight.
_TABLE: dict[tuple[Kind, int], AttentionConfig] = {
    ("decode", 64): AttentionConfig(16, 128, 4, 3),
    ("decode", 128): AttentionConfig(16, 64, 4, 3),
    ("decode", 256): AttentionConfig(16, 32, 4, 3),
    ("prefill", 64): AttentionConfig(128, 64, 8, 3),
    ("prefill", 128): AttentionConfig(128, 64, 8, 3),
    ("prefill", 256): AttentionConfig(64, 64, 8, 2),
    ("exact", 64): AttentionConfig(64, 64, 4, 3),
    ("exact", 128): AttentionConfig(64, 64, 8, 3),
    ("exact", 256): AttentionConfig(64, 32, 8, 3),
}
# Where sm_80, whose queries lie in registers, needs less; quantised keys and values pass through registers too.
_SM80: dict[tuple[Kind, int], AttentionConfig] = {
    ("prefill", 128): AttentionConfig(128, 32, 8, 3),
    ("prefill", 256): AttentionConfig(64, 32, 8, 2),
}
_SM80_QUANTISED: dict[tuple[Kind, int], AttentionConfig] = {
    ("prefill", 128): AttentionConfig(64, 64, 8, 3),
    ("prefill", 256): AttentionConfig(64, 32, 8, 2),
    ("exact", 128): AttentionConfig(64, 32, 8, 3),
}
# Three products of TF32 for each of float32.
_F32 = AttentionConfig(16, 32, 4, 2)


def attention_config(
    kind: Kind, group: int, head_dim: int, dtype: torch.dtype, architecture: int, *, quantised: bool = False
) -> AttentionConfig:
    """The configuration for a launch with queries of `dtype`; never fewer rows than one token's heads."""
    key = kind, padded_dim(head_dim)
    older = (_SM80_QUANTISED if quantised else _SM80).get(key) if architecture < 90 else None
    found = _F32 if dtype == torch.float32 else older or _TABLE[key]
    rows = max(found.block_m, padded_rows(group))
    return AttentionConfig(rows, found.block_n, found.num_warps, found.num_stages)


def padded_rows(group: int) -> int:
    """Rows of the smallest tile that holds one token's heads of a KV head."""
    return max(MIN_ROWS, 1 << (group - 1).bit_length())


def padded_dim(head_dim: int) -> int:
    """The power of two that a head's vectors are padded to in registers, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())
