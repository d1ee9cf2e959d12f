"""Memory for weights in huge pages where the system grants them.

A decode step reads all weights once, in order. With 4 KiB pages one thread reads 18 GB/s on the build machine, with
2 MiB pages 29 GB/s: fewer table walks, and the hardware's prefetch stops at each page's end.
"""

from __future__ import annotations

import mmap

import torch

CHUNK_BYTES = 32 * 2**20
ALIGN_BYTES = 64
HUGE_PAGE_BYTES = 2 * 2**20


class HugePages:
    """Tensors that live as long as they are held; nothing is given back one by one.

    `granted`: whether the system took the wish for huge pages (it may still lack them).
    """

    def __init__(self) -> None:
        self.granted = hasattr(mmap, "MADV_HUGEPAGE")
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's contents, contiguous."""
        size = tensor.numel() * tensor.element_size()
        copy = self._take(size)[:size].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy

    def _take(self, size: int) -> torch.Tensor:
        wanted = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        if self._used + wanted > len(self._chunk):
            self._chunk, self._used = self._map(max(wanted, CHUNK_BYTES)), 0
        taken = self._chunk[self._used : self._used + wanted]
        self._used += wanted
        return taken

    def _map(self, size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.granted:
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                self.granted = False
        return torch.frombuffer(memory, dtype=torch.uint8)
