"""Paged attention: the reference against a direct softmax, the compiled kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch
from kernels.cpu import library
from kernels.paged_attention import paged_attention

from .batches import make_batch, make_pool

NUM_BLOCKS = 240
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
# kv_heads, query heads of each, head_dim
HEADS = [(3, 3, 64), (2, 1, 32), (1, 8, 128), (2, 4, 48), (2, 2, 16), (1, 5, 80), (1, 2, 256)]
SEQUENCES = {
    "one token": [(1, 1)],
    "page borders": [(1, 15), (1, 16), (1, 17), (16, 16), (17, 32), (5, 33)],
    "tile borders": [(1, 63), (1, 64), (1, 65), (64, 64), (2, 129)],
    "odd prefill": [(97, 97), (33, 70)],
    "split alone": [(1, 1090)],
    "span borders": [(1, 512), (1, 513), (3, 514), (40, 1030)],
}


def direct(query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, scale: float) -> torch.Tensor:
    """Softmax attention in float64, sequence by sequence."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // pool.shape[1]
    for seq, context in enumerate(batch.context_lens.tolist()):
        slots = batch.block_tables[seq, : -(-context // BLOCK_TOKENS)].tolist()
        kv = pool[slots, :, layer].double().permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
        keys, values = kv.repeat_interleave(group, 1)
        begin, end = batch.query_starts[seq : seq + 2].tolist()
        scores = torch.einsum("thd,hcd->htc", query[begin:end].double(), keys) * scale
        seen = torch.arange(context) <= torch.arange(context - (end - begin), context)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("htc,hcd->thd", weights, values)
    return out


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_softmax_attention(sequences: list[tuple[int, int]], dtype: torch.dtype) -> None:
    batch = make_batch(sequences, NUM_BLOCKS)
    pool = make_pool(batch, (3, 2, 64), NUM_BLOCKS, dtype)
    query = torch.randn(batch.num_tokens, 9, 64).to(dtype)
    found = paged_attention(query, pool, 1, batch, scale=0.125)
    torch.testing.assert_close(
        found.double(), direct(query, pool, 1, batch, 0.125), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_agrees(heads: tuple[int, int, int], sequences: list[tuple[int, int]], dtype: torch.dtype) -> None:
    kv_heads, group, head_dim = heads
    batch = make_batch(sequences, NUM_BLOCKS)
    pool = make_pool(batch, (kv_heads, 2, head_dim), NUM_BLOCKS, dtype)
    query = torch.randn(batch.num_tokens, kv_heads * group, head_dim).to(dtype)
    expected = paged_attention(query, pool, 1, batch, scale=0.2)
    found = library.paged_attention(query, pool, 1, batch, scale=0.2, num_threads=2)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [1, 64, 300, 1100])
def test_a_row_never_depends_on_its_neighbours(context: int, dtype: torch.dtype) -> None:
    """The last query alone, among the queries before it, and beside other sequences."""
    whole = make_batch([(context, context), (1, 40), (70, 90)], NUM_BLOCKS)
    pool = make_pool(whole, (3, 1, 64), NUM_BLOCKS, dtype)
    query = torch.randn(whole.num_tokens, 9, 64).to(dtype)
    alone = make_batch([(1, context)], NUM_BLOCKS)
    expected = library.paged_attention(query, pool, 0, whole, scale=0.125, num_threads=2)[context - 1]
    last = query[context - 1 : context].contiguous()
    for threads in (1, 2, 5):
        assert torch.equal(library.paged_attention(last, pool, 0, alone, scale=0.125, num_threads=threads)[0], expected)


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([(1, 200), (30, 100)], NUM_BLOCKS)
    pool = make_pool(batch, (1, 1, 64), NUM_BLOCKS, torch.float32) * 30
    query = torch.randn(batch.num_tokens, 3, 64) * 30
    found = library.paged_attention(query, pool, 0, batch, scale=1.0, num_threads=2)
    torch.testing.assert_close(found, paged_attention(query, pool, 0, batch, scale=1.0), atol=1e-3, rtol=1e-3)
