"""The plain-torch references of what model families add: windows, soft caps, partial rotation, normalised heads."""

from __future__ import annotations

import pytest
import torch

from kernels import rotary
from kernels.batch import BLOCK_TOKENS, PagedBatch
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm

from .batches import make_batch, make_pool

NUM_BLOCKS = 60
SEQUENCES = [(1, 1), (3, 64), (97, 130), (1, 300)]


def direct(
    query: torch.Tensor, pool: torch.Tensor, batch: PagedBatch, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """Attention of layer 0 in float64, token by token."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // pool.shape[1]
    for seq in range(len(batch.context_lens)):
        kv = pool[batch.block_tables[seq], :, 0].double().permute(2, 1, 0, 3, 4).flatten(2, 3)
        for token in range(*batch.query_starts[seq : seq + 2].tolist()):
            end = int(batch.positions[token]) + 1
            begin = max(end - window, 0) if window else 0
            keys, values = kv[:, :, begin:end].repeat_interleave(group, 1)
            scores = torch.einsum("hd,hcd->hc", query[token].double(), keys) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[token] = torch.einsum("hc,hcd->hd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 16, 63, 64, 100, 1000])
def test_window_and_softcap(window: int, softcap: float) -> None:
    batch = make_batch(SEQUENCES, NUM_BLOCKS)
    pool = make_pool(batch, (2, 1, 16), NUM_BLOCKS, torch.float32)
    query = torch.randn(batch.num_tokens, 4, 16)
    found = paged_attention(query, pool, 0, batch, scale=0.7, window=window, softcap=softcap)
    expected = direct(query, pool, batch, 0.7, window, softcap)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_what_lies_before_the_window_is_never_read() -> None:
    batch = make_batch([(1, 200)], NUM_BLOCKS)
    pool = make_pool(batch, (1, 1, 16), NUM_BLOCKS, torch.float32)
    query = torch.randn(1, 1, 16)
    expected = paged_attention(query, pool, 0, batch, scale=0.5, window=40)
    pool[batch.block_tables[0, :10]] = torch.nan
    assert torch.equal(paged_attention(query, pool, 0, batch, scale=0.5, window=40), expected)


@pytest.mark.parametrize("window", [10, 70, 128])
def test_a_window_keeps_rows_independent(window: int) -> None:
    """The last query has the same bits alone, where whole tiles are skipped, and beside older ones."""
    whole = make_batch([(300, 300), (5, 20)], NUM_BLOCKS)
    pool = make_pool(whole, (2, 1, 16), NUM_BLOCKS, torch.float32)
    query = torch.randn(whole.num_tokens, 4, 16)
    expected = paged_attention(query, pool, 0, whole, scale=0.5, window=window)[299]
    alone = make_batch([(1, 300)], NUM_BLOCKS)
    assert torch.equal(paged_attention(query[299:300], pool, 0, alone, scale=0.5, window=window)[0], expected)


@pytest.mark.parametrize("rotary_dim", [8, 32])
def test_normalised_heads_that_turn_in_part(rotary_dim: int) -> None:
    batch = make_batch([(2, 2), (7, 21)], NUM_BLOCKS)
    heads, kv_heads, head_dim = 4, 2, 32
    qkv = torch.randn(batch.num_tokens, (heads + 2 * kv_heads) * head_dim)
    q_norm, k_norm = torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5
    frequencies = 10000.0 ** -torch.arange(0, 1, 2 / rotary_dim)
    cos, sin = rotary.rotary_table(frequencies, 32, factor=1.25)
    pool = torch.zeros(NUM_BLOCKS, kv_heads, 1, 2, BLOCK_TOKENS, head_dim)
    arguments = {"heads": heads, "cos": cos, "sin": sin, "layer": 0, "q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    query = rotary.rotary_write(qkv, batch, pool=pool, **arguments)
    for token in range(batch.num_tokens):
        position = int(batch.positions[token])
        rows = qkv[token].view(-1, head_dim)
        slot = batch.block_tables[int(token >= 2), position // BLOCK_TOKENS]
        stored = pool[slot, :, 0, :, position % BLOCK_TOKENS]
        assert torch.equal(stored[:, 1], rows[heads + kv_heads :])
        for head, found in enumerate([*query[token], *stored[:, 0]]):
            normed = rms_norm(rows[head], q_norm if head < heads else k_norm, eps=1e-6, dtype=torch.float32)
            half = rotary_dim // 2
            pairs = torch.complex(normed[:half], normed[half:rotary_dim])
            turned = 1.25 * pairs * torch.polar(torch.ones(half), position * frequencies)
            expected = torch.cat((turned.real, turned.imag, normed[rotary_dim:]))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
