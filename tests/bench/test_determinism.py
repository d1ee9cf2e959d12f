"""The arithmetic that stands for "not exact" is still the model's, and differences are found where they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.determinism import first_difference
from bench.determinism_engine import _plain_attention
from kernels.batch import PagedBatch
from kernels.paged_attention import paged_attention


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([1], [], 0)],
)
def test_first_difference(first: list[int], second: list[int], position: int | None) -> None:
    assert first_difference(first, second) == position


def test_plain_attention_is_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(6, 2, 3, 2, 16, 32, generator=generator)
    batch = PagedBatch(
        token_ids=np.zeros(8, np.int32),
        positions=np.array([20, *range(3, 10)], np.int32),
        query_starts=np.array([0, 1, 8], np.int32),
        context_lens=np.array([21, 10], np.int32),
        block_tables=np.array([[4, 1], [2, -1]], np.int32),
        logit_rows=np.array([0, 7], np.int32),
    )
    query = torch.randn(8, 6, 32, generator=generator)
    expected = paged_attention(query, pool, 1, batch, scale=0.2)
    torch.testing.assert_close(_plain_attention(query, pool, 1, batch, scale=0.2), expected)
