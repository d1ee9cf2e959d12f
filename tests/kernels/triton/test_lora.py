"""Adapters in Triton against their specification: any order of tokens, idle adapters, odd ranks, parts of outputs."""

from __future__ import annotations

import pytest
import torch

from kernels import lora as reference
from kernels.lora import Adapters
from kernels.triton.lora import add_lora, num_splits, plan

K = 144


def make(rank: int, dtype: torch.dtype = torch.float32, k: int = K) -> Adapters:
    down, up = torch.randn(3, rank, k) / 8, torch.randn(3, 40, rank) / 4
    return Adapters(down.to(dtype), up.to(dtype), torch.tensor([1.0, 0.25, 3.0]))


def check(adapters: Adapters, index: list[int], *, exact: bool, out_dtype: torch.dtype = torch.float32) -> None:
    tokens = torch.tensor(index, dtype=torch.int32)
    dtype = adapters.down.dtype
    x, out = torch.randn(len(index), adapters.down.shape[2]).to(dtype), torch.randn(len(index), 40).to(out_dtype)
    expected = out.clone()
    reference.add_lora(expected, x, adapters, tokens)
    add_lora(out, x, adapters, plan(tokens, 3, exact=exact))
    tolerance = 1e-4 if dtype == out_dtype == torch.float32 else 0.1
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 24, 64])
def test_tokens_in_any_order(rank: int, dtype: torch.dtype, exact: bool) -> None:
    check(make(rank, dtype), [2, -1, 0, 2, 2, 0, -1, 0, 2], exact=exact, out_dtype=dtype)


@pytest.mark.parametrize("index", [[-1, -1], [1], [0] * 40, [0] * 110 + [2] * 20, [-1] * 30 + [2]])
def test_idle_adapters_and_crowded_ones(index: list[int]) -> None:
    check(make(16), index, exact=False)


def test_long_inner_length_is_summed_in_parts() -> None:
    assert [num_splits(k) for k in (16, 512, 1024, 1600, 4096, 14336)] == [1, 1, 2, 2, 8, 8]
    check(make(16, k=1100), [0, 1, 1], exact=True)


def test_rows_are_independent_in_exact_mode() -> None:
    adapters, x, out = make(16, torch.bfloat16, 1040), torch.randn(40, 1040).to(torch.bfloat16), torch.randn(40, 40)
    index = torch.randint(-1, 3, (40,), dtype=torch.int32)
    whole = out.clone()
    add_lora(whole, x, adapters, plan(index, 3, exact=True))
    for rows in (1, 17):
        part = out[-rows:].clone()
        add_lora(part, x[-rows:], adapters, plan(index[-rows:], 3, exact=True))
        assert torch.equal(part, whole[-rows:])


def test_part_of_a_fused_output() -> None:
    adapters, x, out = make(16), torch.randn(2, K), torch.zeros(2, 100)
    index = torch.tensor([1, 0], dtype=torch.int32)
    expected = torch.zeros(2, 40)
    reference.add_lora(expected, x, adapters, index)
    add_lora(out[:, 50:90], x, adapters, plan(index, 3, exact=False))
    torch.testing.assert_close(out[:, 50:90], expected, atol=1e-4, rtol=1e-4)
    assert not out[:, :50].any()
    assert not out[:, 90:].any()


def test_no_tokens_and_too_high_a_rank() -> None:
    groups = plan(torch.empty(0, dtype=torch.int32), 3, exact=False)
    add_lora(torch.zeros(0, 40), torch.zeros(0, K), make(16), groups)
    with pytest.raises(ValueError, match="rank 200"):
        add_lora(
            torch.zeros(1, 40), torch.zeros(1, K), make(200), plan(torch.zeros(1, dtype=torch.int32), 3, exact=True)
        )
