"""The paged KV pool as a tensor over memory that somebody else owns (shared memory, seen by the mover too)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from services.worker.model.layout import KvDtype, KvLayout

PoolBuffer = mmap.mmap | memoryview | bytearray

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class KvPool:
    """`blocks`: [num_blocks, kv_heads, layers, 2, 16, head_dim], a view of the buffer it was made from."""

    blocks: torch.Tensor
    layout: KvLayout

    @classmethod
    def from_buffer(cls, buffer: PoolBuffer, layout: KvLayout) -> KvPool:
        """View a writable buffer; what remains after the last whole block is left alone.

        The buffer is kept alive and cannot be closed while the pool lives. Raises ValueError when it is read-only or
        does not hold one block.
        """
        view = memoryview(buffer)
        if view.readonly:
            raise ValueError("KV pool buffer is read-only")
        num_blocks = layout.num_blocks(view.nbytes)
        if num_blocks == 0:
            raise ValueError(f"KV pool buffer of {view.nbytes} bytes does not hold one block of {layout.block_bytes}")
        dtype = TORCH_DTYPES[layout.dtype]
        count = layout.pool_bytes(num_blocks) // dtype.itemsize
        flat = torch.frombuffer(view, dtype=dtype, count=count)
        return cls(flat.view(num_blocks, *layout.block_shape), layout)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)
