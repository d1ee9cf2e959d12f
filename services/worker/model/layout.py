"""The KV pool's layout, fixed for every process of a worker. Torch-free: the mover and the scheduler import it.

A pool is an array of blocks of 16 tokens; a block is one contiguous run `[kv_head][layer][k|v][token][head_dim]`, so
that the share of a range of KV heads is contiguous in it. Keys are stored after rotary embedding.

Quantised KV (one byte an element) has a float32 scale for each key and value vector. In a pool the scales are an array
of their own, `[block][kv_head][layer][k|v][token]`; a block that travels has each head's scales behind its elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.blocks import BLOCK_TOKENS

ComputeDtype = Literal["bfloat16", "float32"]
KvDtype = Literal["bfloat16", "float32", "float8_e4m3fn", "int8"]
# What the weights of linear layers are rounded to before they are executed; "dtype": to the compute dtype.
CpuWeightDtype = Literal["dtype", "int8", "int8-dynamic", "int4"]
DeviceWeightDtype = Literal["dtype", "int8", "int4", "float8"]
WeightDtype = Literal[CpuWeightDtype, DeviceWeightDtype]

KV_DTYPE_BYTES: dict[KvDtype, int] = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}
QUANTISED: frozenset[KvDtype] = frozenset({"float8_e4m3fn", "int8"})
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block; all sizes in bytes follow from it."""

    num_kv_heads: int
    num_layers: int
    head_dim: int
    dtype: KvDtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[kv_head][layer][k|v][token][head_dim]."""
        return self.num_kv_heads, self.num_layers, 2, BLOCK_TOKENS, self.head_dim

    @property
    def is_quantised(self) -> bool:
        """Whether there are scales."""
        return self.dtype in QUANTISED

    @property
    def kv_head_bytes(self) -> int:
        """Bytes of one KV head in a block: the unit of checksums and of tensor-parallel shares."""
        vector_bytes = self.head_dim * KV_DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.is_quantised else 0)
        return self.num_layers * 2 * BLOCK_TOKENS * vector_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_kv_heads * self.kv_head_bytes

    def num_blocks(self, pool_bytes: int) -> int:
        """Whole blocks that fit a pool of this size."""
        return pool_bytes // self.block_bytes

    def pool_bytes(self, num_blocks: int) -> int:
        """Size of a pool of that many blocks."""
        return num_blocks * self.block_bytes
