"""The pool is a view of memory that others see; its layout is the one the whole mesh agreed on."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest
import torch

from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import KvLayout

LAYOUT = KvLayout(num_kv_heads=3, num_layers=2, head_dim=64, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.kv_head_bytes == 2 * 2 * 16 * 64 * 2
    assert LAYOUT.block_bytes == 3 * LAYOUT.kv_head_bytes
    assert LAYOUT.num_blocks(LAYOUT.pool_bytes(7) + 5) == 7


def test_a_view_of_the_buffer() -> None:
    buffer = mmap.mmap(-1, LAYOUT.pool_bytes(4) + 100)
    pool = KvPool.from_buffer(buffer, LAYOUT)
    assert pool.num_blocks == 4
    pool.blocks[2, 1, 0, 1, 5, 7] = 1.0
    offset = 2 * LAYOUT.block_bytes + LAYOUT.kv_head_bytes + ((1 * 16 + 5) * 64 + 7) * 2
    assert buffer[offset : offset + 2] == b"\x80\x3f"
    assert bytes(buffer).count(0) == len(buffer) - 2


def test_refused_buffers() -> None:
    with pytest.raises(ValueError, match="read-only"):
        KvPool.from_buffer(memoryview(bytes(LAYOUT.block_bytes)), LAYOUT)
    with pytest.raises(ValueError, match="does not hold one block"):
        KvPool.from_buffer(bytearray(LAYOUT.block_bytes - 1), LAYOUT)


def test_float32() -> None:
    layout = KvLayout(1, 1, 16, "float32")
    pool = KvPool.from_buffer(bytearray(layout.pool_bytes(1)), layout)
    assert pool.blocks.dtype == torch.float32


def test_the_layout_needs_no_torch() -> None:
    code = "import sys, services.worker.model.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
