"""The paged KV pool as a tensor: over memory that somebody else owns and the mover sees too, or on a device."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from services.worker.model.layout import KvDtype, KvLayout

PoolBuffer = mmap.mmap | memoryview | bytearray

TORCH_DTYPES: dict[KvDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class KvPool:
    """`blocks`: [num_blocks, kv_heads, layers, 2, 16, head_dim]; scales, where quantised: float32 without head_dim."""

    blocks: torch.Tensor
    layout: KvLayout
    scales: torch.Tensor | None = None

    @classmethod
    def on_device(cls, device: torch.device, layout: KvLayout, num_blocks: int) -> KvPool:
        """A pool of its own memory. It starts as zeros: padding is multiplied with zero, and NaN would stay NaN."""
        shape = (num_blocks, *layout.block_shape)
        blocks = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        scales = torch.ones(shape[:-1], device=device) if layout.is_quantised else None
        return cls(blocks, layout, scales)

    @classmethod
    def from_buffer(cls, buffer: PoolBuffer, layout: KvLayout) -> KvPool:
        """View a writable buffer; what remains after the last whole block is left alone.

        The buffer is kept alive and cannot be closed while the pool lives. Raises ValueError when it is read-only or
        does not hold one block.
        """
        view = memoryview(buffer)
        if layout.is_quantised:
            raise ValueError(f"KV of {layout.dtype} has scales of its own and lies on a device, not in a buffer")
        if view.readonly:
            raise ValueError("KV pool buffer is read-only")
        num_blocks = layout.num_blocks(view.nbytes)
        if num_blocks == 0:
            raise ValueError(f"KV pool buffer of {view.nbytes} bytes does not hold one block of {layout.block_bytes}")
        dtype = TORCH_DTYPES[layout.dtype]
        count = layout.pool_bytes(num_blocks) // dtype.itemsize
        flat = torch.frombuffer(view, dtype=dtype, count=count)
        return cls(flat.view(num_blocks, *layout.block_shape), layout)

    def part(self, kv_heads: range, layers: range) -> KvPool:
        """A view of some heads and layers of every block; its layout is that of the whole block."""
        blocks = self.blocks[:, kv_heads.start : kv_heads.stop, layers.start : layers.stop]
        return KvPool(blocks, self.layout, self.scales)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)
