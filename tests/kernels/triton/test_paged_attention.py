"""The Triton kernel of paged attention against its reference, over everything that a batch and a model may have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels import paged_attention as reference
from kernels.batch import PagedBatch
from kernels.kv_quantisation import quantise, quantised_attention
from kernels.triton.attention_configs import SPAN_TOKENS, AttentionConfig
from kernels.triton.device_batch import BatchShape, DeviceBatch, padded
from kernels.triton.paged_attention import choose_splits, paged_attention
from tests.kernels.batches import make_batch, make_pool

from .device import DEVICE

NUM_BLOCKS = 400
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# Small tiles of the same kernel, so that short contexts have many of them.
SMALL = AttentionConfig(16, 16, 4, 2)
SEQUENCES = {
    "one token": [(1, 1)],
    "decode": [(1, 15), (1, 16), (1, 17), (1, 100), (1, 1)],
    "speculative": [(3, 40), (2, 2), (1, 33)],
    "prefill": [(21, 21)],
    "chunk": [(9, 90)],
    "mixed": [(1, 65), (13, 13), (1, 1), (5, 54)],
}


def run(query: torch.Tensor, pool: torch.Tensor, batch: PagedBatch, layer: int = 1, **given: object) -> torch.Tensor:
    """The kernel on the device, the result on the CPU."""
    scales = given.pop("kv_scales", None)
    moved = None if scales is None else scales.to(DEVICE)  # type: ignore[attr-defined]
    found = paged_attention(
        query.to(DEVICE), pool.to(DEVICE), layer, DeviceBatch.from_batch(batch, DEVICE), kv_scales=moved, **given
    )  # type: ignore[arg-type]
    return found.cpu()


def check(
    sequences: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype, splits: int = 1, **given: object
) -> None:
    """shape: kv_heads, query heads of each, head_dim."""
    kv_heads, group, head_dim = shape
    batch = make_batch(sequences, NUM_BLOCKS)
    pool = make_pool(batch, (kv_heads, 2, head_dim), NUM_BLOCKS, dtype)
    query = torch.randn(batch.num_tokens, kv_heads * group, head_dim).to(dtype)
    options = {key: value for key, value in given.items() if key in ("window", "softcap")}
    expected = reference.paged_attention(query, pool, 1, batch, scale=0.2, **options)  # type: ignore[arg-type]
    found = run(query, pool, batch, scale=0.2, splits=splits, **given)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_batches(sequences: list[tuple[int, int]], splits: int) -> None:
    check(sequences, (2, 3, 32), torch.float32, splits, config=SMALL)


@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_groups_as_configured(group: int, dtype: torch.dtype) -> None:
    check([(1, 70), (5, 20)], (1, group, 16), dtype)
    check([(1, 70), (1, 3)], (1, group, 16), dtype, splits=2)


@pytest.mark.parametrize("head_dim", [48, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check([(1, 37), (6, 18)], (1, 2, head_dim), torch.float32)
    check([(1, 37)], (2, 2, head_dim), torch.bfloat16, splits=2)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 200])
@pytest.mark.parametrize("splits", [1, 2])
def test_windows(window: int, splits: int) -> None:
    check([(1, 90), (9, 60), (2, 2)], (1, 2, 32), torch.float32, splits, window=window, config=SMALL)


@pytest.mark.parametrize("exact", [False, True])
def test_soft_cap(exact: bool) -> None:
    check([(1, 40), (12, 30)], (1, 2, 32), torch.float32, softcap=1.5, exact=exact, config=SMALL)
    check([(1, 40), (12, 30)], (1, 2, 32), torch.float32, softcap=1.5, window=11, exact=exact, config=SMALL)


@pytest.mark.parametrize(("splits", "contexts"), [(1, range(1, 101)), (3, [*range(60, 101, 8), 63, 65, 79, 81, 97])])
def test_every_short_context(splits: int, contexts: Sequence[int]) -> None:
    check([(1, context) for context in contexts], (1, 1, 16), torch.float32, splits, config=SMALL)


@pytest.mark.parametrize("kv", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("dtype", "splits"), [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 1)])
def test_quantised_pools(kv: torch.dtype, dtype: torch.dtype, splits: int) -> None:
    """Scales of very different sizes, and garbage in elements and scales that no token may see."""
    batch = make_batch([(1, 50), (7, 20)], NUM_BLOCKS)
    plain = make_pool(batch, (1, 2, 48), NUM_BLOCKS, torch.float32)
    plain *= torch.logspace(-2, 1, 16)[:, None]
    pool, scales = quantise(plain.nan_to_num(), kv)
    hidden = plain.isnan()
    pool.view(torch.uint8)[hidden] = 0x7F
    scales[hidden.all(-1)] = torch.nan
    query = torch.randn(batch.num_tokens, 3, 48).to(dtype)
    seen = quantise(plain.nan_to_num(), kv)
    for options in ({}, {"window": 9}, {"softcap": 2.0}):
        expected = quantised_attention(query, *seen, 1, batch, scale=0.15, **options)
        found = run(query, pool, batch, scale=0.15, splits=splits, kv_scales=scales, config=SMALL, **options)
        torch.testing.assert_close(found, expected, atol=4e-3 if dtype == torch.float32 else 5e-2, rtol=2e-2)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_padding_changes_nothing_and_gets_zeros(exact: bool, splits: int) -> None:
    """As in a captured graph: more sequences and tokens, and bounds far above what the batch has."""
    batch = make_batch([(1, 40), (1, 17), (1, 3)], NUM_BLOCKS)
    pool = make_pool(batch, (1, 2, 32), NUM_BLOCKS, torch.float32)
    full = padded(batch, BatchShape(8, 8, 20, 8))
    query = torch.randn(8, 2, 32)
    options = {"scale": 0.2, "config": SMALL, "exact": exact, "splits": splits}
    alone = run(query[:3].contiguous(), pool, batch, **options)
    device_batch = DeviceBatch.from_batch(full, DEVICE)
    wide = DeviceBatch(
        **{name: getattr(device_batch, name) for name in DeviceBatch.__dataclass_fields__ if "max" not in name},
        max_query_len=4,
        max_context_len=320,
    )
    found = paged_attention(query.to(DEVICE), pool.to(DEVICE), 1, wide, **options).cpu()  # type: ignore[arg-type]
    torch.testing.assert_close(found[:3], alone, atol=0.0 if exact else 1e-6, rtol=0.0)
    assert (found[3:] == 0).all()


@pytest.mark.parametrize("window", [0, 700])
def test_exact_rows_are_equal_whatever_is_beside_them(window: int) -> None:
    """One token alone, split and not; as the end of chunks of several sizes; among other sequences."""
    context = 2 * SPAN_TOKENS + 70
    whole = make_batch([(9, context), (1, 40), (30, 45)], NUM_BLOCKS)
    pool = make_pool(whole, (1, 1, 16), NUM_BLOCKS, torch.bfloat16)
    query = torch.randn(whole.num_tokens, 3, 16).bfloat16()
    options = {"layer": 0, "scale": 0.3, "exact": True, "window": window}
    expected = run(query, pool, whole, splits=1, **options)[8]
    assert torch.isfinite(expected).all()
    for tokens, splits in ((1, 1), (1, 2), (1, 3), (4, 1), (9, 3)):
        part = make_batch([(tokens, context)], NUM_BLOCKS)
        found = run(query[9 - tokens : 9].contiguous(), pool, part, splits=splits, **options)
        assert torch.equal(found[-1], expected), (tokens, splits)


def test_exact_spans_agree_with_the_reference() -> None:
    context = SPAN_TOKENS + 33
    batch = make_batch([(3, context)], NUM_BLOCKS)
    pool = make_pool(batch, (1, 1, 16), NUM_BLOCKS, torch.float32)
    query = torch.randn(3, 2, 16)
    expected = reference.paged_attention(query, pool, 0, batch, scale=0.3)
    for splits in (1, 2):
        found = run(query, pool, batch, layer=0, scale=0.3, exact=True, splits=splits)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([(1, 50), (9, 20)], NUM_BLOCKS)
    pool = make_pool(batch, (1, 2, 32), NUM_BLOCKS, torch.float32) * 30
    query = torch.randn(batch.num_tokens, 2, 32) * 30
    expected = reference.paged_attention(query, pool, 1, batch, scale=1.0)
    found = run(query, pool, batch, scale=1.0, config=SMALL, splits=2)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_splits_fill_the_device() -> None:
    assert choose_splits(8, 396, 64) in range(44, 50)  # one sequence: nearly one round of programs
    assert choose_splits(256, 396, 64) == 3  # two thirds of a round become two rounds
    assert choose_splits(4 * 396, 396, 64) == 1
    assert choose_splits(8, 396, 4) == 4  # no more than there is work for
    assert choose_splits(390, 396, 64) == 1


def test_what_does_not_belong_together_is_refused() -> None:
    batch = make_batch([(1, 5)], NUM_BLOCKS)
    pool = make_pool(batch, (2, 1, 32), NUM_BLOCKS, torch.float32)
    query = torch.randn(1, 4, 32)
    for wrong, options in (
        ((torch.randn(1, 3, 32), pool), {}),
        ((torch.randn(1, 4, 16), pool), {}),
        ((query.bfloat16(), pool), {}),
        ((query, pool.to(torch.int8)), {}),
        ((query, pool), {"kv_scales": torch.ones(pool.shape[:-1])}),
        ((query, pool.to(torch.int8)), {"kv_scales": torch.ones(3)}),
        ((query.transpose(0, 1), pool), {}),
    ):
        with pytest.raises(ValueError, match=r"pool|scales|contiguous"):
            run(*wrong, batch, layer=0, scale=0.2, **options)
    with pytest.raises(ValueError, match="positive"):
        run(query, pool, batch, layer=0, scale=0.0)
