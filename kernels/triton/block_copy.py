"""Blocks between the paged pool and the contiguous transfer layout, many in one launch; see kernels/block_copy.py.

Plain copies of 16 bytes a thread, so bound by memory alone. Addresses are 64 bits wide: a pool may be of any size. The
staging may be pinned host memory, which a device reads and writes over its bus.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.batch import BLOCK_TOKENS
from kernels.block_copy import SCALE_BYTES, head_bytes
from kernels.triton.registry import KernelConfig

WORD_BYTES = 8
# Words that one program copies: 16 KiB, eight loads of 16 bytes in flight for each of its threads.
CHUNK_WORDS = 2048
NUM_WARPS = 4


@triton.jit(do_not_specialize=["first_head", "num_heads", "pool_heads"])
def copy_blocks(
    pool: tl.tensor,
    scales: tl.tensor,
    staging: tl.tensor,
    slots: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.tensor,
    pool_heads: tl.tensor,
    data_words: tl.tensor,
    scale_words: tl.tensor,
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Grid (blocks * num_heads * chunks of a head). Words are int64; data_words and scale_words are of one head."""
    data_chunks = tl.cdiv(data_words, CHUNK)
    chunks = data_chunks
    if SCALED:
        chunks += tl.cdiv(scale_words, CHUNK)
    part = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    slot = tl.load(slots + part // num_heads).to(tl.int64)
    if slot < 0:
        return
    head = slot * pool_heads + first_head + part % num_heads
    staged = staging + part.to(tl.int64) * (data_words + scale_words)
    if chunk < data_chunks:
        words = chunk * CHUNK + tl.arange(0, CHUNK)
        pooled = pool + head * data_words + words
        inside = words < data_words
        if GATHER:
            tl.store(staged + words, tl.load(pooled, mask=inside), mask=inside)
        else:
            tl.store(pooled, tl.load(staged + words, mask=inside), mask=inside)
    elif SCALED:
        words = (chunk - data_chunks) * CHUNK + tl.arange(0, CHUNK)
        pooled = scales + head * scale_words + words
        inside = words < scale_words
        if GATHER:
            tl.store(staged + data_words + words, tl.load(pooled, mask=inside), mask=inside)
        else:
            tl.store(pooled, tl.load(staged + data_words + words, mask=inside), mask=inside)


def gather_blocks(
    pool: torch.Tensor,
    slots: torch.Tensor,
    staging: torch.Tensor,
    *,
    first_head: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Copy blocks out of the pool. slots int32 [n] on the device, -1: nothing is copied.

    staging uint8 [n, heads * head_bytes], contiguous: as many heads from `first_head` on as its rows hold. Raises
    ValueError for a staging of another shape.
    """
    _copy(pool, slots, staging, first_head, kv_scales, gather=True)


def scatter_blocks(
    pool: torch.Tensor,
    slots: torch.Tensor,
    staging: torch.Tensor,
    *,
    first_head: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Copy blocks into the pool, the reverse of gather_blocks. No slot may be there twice."""
    _copy(pool, slots, staging, first_head, kv_scales, gather=False)


def _copy(
    pool: torch.Tensor,
    slots: torch.Tensor,
    staging: torch.Tensor,
    first_head: int,
    kv_scales: torch.Tensor | None,
    *,
    gather: bool,
) -> None:
    each = head_bytes(pool, kv_scales)
    heads, rest = divmod(staging.shape[1], each)
    if rest or not 0 <= first_head <= pool.shape[1] - heads or len(slots) != len(staging):
        raise ValueError(f"staging {tuple(staging.shape)} for heads of {each} bytes from {first_head} on")
    if not (staging.is_contiguous() and pool.is_contiguous()):
        raise ValueError("staging and pool must be contiguous")
    scale_words = 0 if kv_scales is None else pool.shape[2] * 2 * BLOCK_TOKENS * SCALE_BYTES // WORD_BYTES
    data_words = each // WORD_BYTES - scale_words
    chunks = triton.cdiv(data_words, CHUNK_WORDS) + triton.cdiv(scale_words, CHUNK_WORDS)
    if not len(slots) * heads:
        return
    copy_blocks[(len(slots) * heads * chunks,)](
        pool.view(torch.int64),
        None if kv_scales is None else kv_scales.view(torch.int64),
        staging.view(torch.int64),
        slots,
        first_head,
        heads,
        pool.shape[1],
        data_words,
        scale_words,
        CHUNK=CHUNK_WORDS,
        GATHER=gather,
        SCALED=kv_scales is not None,
        num_warps=NUM_WARPS,
    )


def _form(gather: bool, scaled: bool) -> KernelConfig:
    return KernelConfig(
        name=f"{'gather' if gather else 'scatter'}-blocks{'-scaled' if scaled else ''}",
        kernel=copy_blocks,
        signature={
            **dict.fromkeys(("pool", "staging", *(("scales",) if scaled else ())), "*i64"),
            "slots": "*i32",
            **dict.fromkeys(("first_head", "num_heads", "pool_heads", "data_words", "scale_words"), "i32"),
        },
        constants={"CHUNK": CHUNK_WORDS, "GATHER": gather, "SCALED": scaled, **({} if scaled else {"scales": None})},
        aligned=("pool", "staging", "slots", "data_words", "scale_words", *(("scales",) if scaled else ())),
        num_warps=NUM_WARPS,
    )


SHIPPED = [_form(gather, scaled) for gather in (True, False) for scaled in (True, False)]
