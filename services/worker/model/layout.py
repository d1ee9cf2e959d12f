"""The KV pool's layout, fixed for every process of a worker. Torch-free: the mover and the scheduler import it.

A pool is an array of blocks of 16 tokens; a block is one contiguous run `[kv_head][layer][k|v][token][head_dim]`, so
that the share of a range of KV heads is contiguous in it. Keys are stored after rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.blocks import BLOCK_TOKENS

KvDtype = Literal["bfloat16", "float32"]

KV_DTYPE_BYTES: dict[KvDtype, int] = {"bfloat16": 2, "float32": 4}


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
    def kv_head_bytes(self) -> int:
        """Bytes of one KV head in a block: the unit of checksums and of tensor-parallel shares."""
        return self.num_layers * 2 * BLOCK_TOKENS * self.head_dim * KV_DTYPE_BYTES[self.dtype]

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
