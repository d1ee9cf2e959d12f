"""The Triton kernel of paged attention against its reference, over everything that a batch and a model may have."""

from __future__ import annotations

import pytest
import torch

from kernels import paged_attention as reference
from kernels.batch import PagedBatch
from kernels.triton.attention_configs import AttentionConfig
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.paged_attention import paged_attention
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
    check([(1, 70), (9, 20)], (1, group, 64), dtype)
    check([(1, 70), (1, 3)], (1, group, 64), dtype, splits=2)


@pytest.mark.parametrize("head_dim", [48, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check([(1, 37), (6, 18)], (1, 2, head_dim), torch.float32)
    check([(1, 37)], (2, 2, head_dim), torch.bfloat16, splits=2)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 200])
@pytest.mark.parametrize("splits", [1, 2])
def test_windows(window: int, splits: int) -> None:
    check([(1, 90), (25, 60), (2, 2)], (1, 2, 32), torch.float32, splits, window=window, config=SMALL)


@pytest.mark.parametrize("exact", [False, True])
def test_soft_cap(exact: bool) -> None:
    check([(1, 40), (12, 30)], (1, 2, 32), torch.float32, softcap=1.5, exact=exact, config=SMALL)
    check([(1, 40), (12, 30)], (1, 2, 32), torch.float32, softcap=1.5, window=11, exact=exact, config=SMALL)


@pytest.mark.parametrize("splits", [1, 3])
def test_every_short_context(splits: int) -> None:
    check([(1, context) for context in range(1, 101)], (1, 1, 16), torch.float32, splits)
