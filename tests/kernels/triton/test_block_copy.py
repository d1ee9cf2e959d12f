"""Gather and scatter of blocks: bytes against the reference, heads of a rank, scales, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch

from kernels import block_copy as reference
from kernels.triton import block_copy

from .device import DEVICE

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]
# kv_heads, layers, head_dim: less than a chunk, whole chunks, and a rest.
SHAPES = [(2, 1, 16), (4, 3, 64), (1, 2, 256), (3, 5, 80)]
SLOTS = torch.tensor([5, 0, 3], dtype=torch.int32)


def make_pool(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    kv_heads, layers, head_dim = shape
    size = (7, kv_heads, layers, 2, 16, head_dim * dtype.itemsize)
    pool = torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)
    return pool, torch.rand(size[:-1]) if dtype.itemsize == 1 else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    pool, scales = make_pool(shape, dtype)
    size = shape[0] * reference.head_bytes(pool, scales)
    expected = torch.full((3, size), 9, dtype=torch.uint8)
    reference.gather_blocks(pool, SLOTS, expected, kv_scales=scales)
    found = torch.full((3, size), 9, dtype=torch.uint8, device=DEVICE)
    moved = None if scales is None else scales.to(DEVICE)
    block_copy.gather_blocks(pool.to(DEVICE), SLOTS.to(DEVICE), found, kv_scales=moved)
    assert torch.equal(found.cpu(), expected)

    other, other_scales = make_pool(shape, dtype)
    targets = torch.tensor([1, 6, 2], dtype=torch.int32)
    written = other.to(DEVICE, copy=True)
    written_scales = None if other_scales is None else other_scales.to(DEVICE, copy=True)
    block_copy.scatter_blocks(written, targets.to(DEVICE), found, kv_scales=written_scales)
    reference.scatter_blocks(other, targets, expected, kv_scales=other_scales)
    assert torch.equal(written.cpu().view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(other[1].view(torch.uint8), pool[5].view(torch.uint8))
    if written_scales is not None and scales is not None and other_scales is not None:
        assert torch.equal(written_scales.cpu(), other_scales)
        assert torch.equal(other_scales[6], scales[0])


def test_a_block_in_flight_has_each_head_and_then_its_scales() -> None:
    pool, scales = make_pool((2, 3, 32), torch.int8)
    assert scales is not None
    staging = torch.zeros(1, 2 * reference.head_bytes(pool, scales), dtype=torch.uint8)
    reference.gather_blocks(pool, SLOTS[:1], staging, kv_scales=scales)
    parts = []
    for head in range(2):
        parts += [pool[5, head].view(torch.uint8).flatten(), scales[5, head].view(torch.uint8).flatten()]
    assert torch.equal(staging[0], torch.cat(parts))


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_ranks_heads(first: int, count: int, dtype: torch.dtype) -> None:
    pool, scales = make_pool((4, 3, 64), dtype)
    each = reference.head_bytes(pool, scales)
    whole = torch.zeros(3, 4 * each, dtype=torch.uint8)
    reference.gather_blocks(pool, SLOTS, whole, kv_scales=scales)
    moved_pool, moved = pool.to(DEVICE, copy=True), None if scales is None else scales.to(DEVICE, copy=True)
    part = torch.zeros(3, count * each, dtype=torch.uint8, device=DEVICE)
    block_copy.gather_blocks(moved_pool, SLOTS.to(DEVICE), part, first_head=first, kv_scales=moved)
    assert torch.equal(part.cpu(), whole[:, first * each : (first + count) * each])
    before = moved_pool.clone()
    block_copy.scatter_blocks(moved_pool, SLOTS.to(DEVICE), part, first_head=first, kv_scales=moved)
    assert torch.equal(moved_pool.view(torch.uint8), before.view(torch.uint8))


def test_a_slot_of_minus_one_is_left_out() -> None:
    pool, _ = make_pool((2, 1, 16), torch.bfloat16)
    staging = torch.full((2, 2 * reference.head_bytes(pool)), 9, dtype=torch.uint8, device=DEVICE)
    slots = torch.tensor([-1, 4], dtype=torch.int32, device=DEVICE)
    on_device = pool.to(DEVICE, copy=True)
    block_copy.gather_blocks(on_device, slots, staging)
    assert (staging[0] == 9).all()
    staging[0] = 1
    block_copy.scatter_blocks(on_device, slots, staging)
    assert torch.equal(on_device.cpu().view(torch.uint8), pool.view(torch.uint8))


def test_what_does_not_fit_is_refused() -> None:
    pool, _ = make_pool((2, 1, 16), torch.bfloat16)
    each = reference.head_bytes(pool)
    for size, slots, first in ((each + 8, 3, 0), (2 * each, 2, 0), (2 * each, 3, 1), (each, 3, -1)):
        with pytest.raises(ValueError, match="staging"):
            block_copy.gather_blocks(pool, SLOTS[:slots], torch.zeros(3, size, dtype=torch.uint8), first_head=first)
    block_copy.gather_blocks(pool, SLOTS[:0], torch.zeros(0, each, dtype=torch.uint8))


def test_addresses_are_wider_than_32_bits() -> None:
    """More than 2 ** 31 words of 8 bytes, of which only the pages of one block are ever touched."""
    try:
        pool = torch.empty((17 << 30) // (2 * 2 * 16 * 256), 2, 1, 2, 16, 256, dtype=torch.int8, device=DEVICE)
    except RuntimeError:
        pytest.skip("the machine does not lend 17 GiB of addresses")
    scales = torch.empty(pool.shape[:-1], device=DEVICE)
    last = len(pool) - 1
    slots = torch.tensor([last], dtype=torch.int32, device=DEVICE)
    written = torch.arange(2 * reference.head_bytes(pool, scales), device=DEVICE).to(torch.uint8)[None]
    block_copy.scatter_blocks(pool, slots, written, kv_scales=scales)
    assert torch.equal(pool[last, 1].view(torch.uint8).flatten(), written[0, 8192 + 128 : -128])
    found = torch.zeros_like(written)
    block_copy.gather_blocks(pool, slots, found, kv_scales=scales)
    assert torch.equal(found, written)
