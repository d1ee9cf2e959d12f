"""The linear layers' kernel with 16-bit, INT8 and INT4 weights against the specification, and rows for themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.linear import linear as linear_reference
from kernels.quantised_linear import Bits, quantise
from kernels.quantised_linear import quantised_linear as quantised_reference
from kernels.triton.linear import linear
from kernels.triton.linear_configs import choose
from kernels.triton.quantised_linear import quantised_linear

# bits, group, asymmetric: every branch of the kernel, groups inside a tile and spanning several.
FORMATS: list[tuple[Bits, int | None, bool]] = [
    (8, None, False),
    (8, 64, False),
    (8, 16, False),
    (8, 128, False),
    (4, None, False),
    (4, None, True),
    (4, 32, False),
    (4, 32, True),
    (4, 64, True),
    (4, 128, False),
    (4, 256, True),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 40, 130), (17, 70, 96), (70, 33, 64)])
def test_dense(shape: tuple[int, int, int], dtype: torch.dtype, exact: bool) -> None:
    rows, n, k = shape
    x, weight, bias = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n)
    expected = x.double() @ weight.double().T + bias
    found = linear(x, weight, bias, exact=exact)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(linear(x, weight, exact=exact, dtype=dtype), linear_reference(x, weight).to(dtype))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("bits", "group", "asymmetric"), FORMATS)
@pytest.mark.parametrize("rows", [1, 20])
def test_quantised(rows: int, bits: Bits, group: int | None, asymmetric: bool, exact: bool) -> None:
    weight = quantise(torch.randn(37, 256) + 0.2, bits, group, asymmetric=asymmetric)
    if weight.zeros is not None:
        weight = replace(weight, zeros=weight.zeros.round())
    x, bias = torch.randn(rows, 256).to(torch.bfloat16), torch.randn(37)
    expected = quantised_reference(x, weight, bias)
    found = quantised_linear(x, weight, bias, exact=exact)
    # Groups shorter than a tile's least inner length have their scaled weights rounded to BF16.
    tolerance = 0.1 if group in (16, 32) else 1e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance / 10)


def test_zeros_that_are_not_whole_round_the_weights() -> None:
    weight = quantise(torch.randn(37, 256) + 0.2, 4, 64, asymmetric=True)
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.3)):
        x = torch.randn(2, 256).to(dtype)
        found = quantised_linear(x, weight, exact=True)
        torch.testing.assert_close(found, quantised_reference(x, weight), atol=tolerance, rtol=tolerance / 10)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32), (4, None)])
def test_inner_length_that_fills_no_tile(bits: Bits, group: int | None) -> None:
    weight = quantise(torch.randn(20, 96), bits, group)
    x = torch.randn(3, 96)
    torch.testing.assert_close(
        quantised_linear(x, weight, exact=False), quantised_reference(x, weight), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("split", [2, 4])
def test_split_sum(split: int) -> None:
    weight, bias = quantise(torch.randn(40, 1024 * split), 8), torch.randn(40)
    x = torch.randn(2, 1024 * split)
    assert choose(2, weight.shape, 8, 0, exact=False)[1] == split
    found = quantised_linear(x, weight, bias, exact=False)
    torch.testing.assert_close(found, quantised_reference(x, weight, bias), atol=2e-3, rtol=1e-4)


def test_number_of_splits_follows_outputs_and_inner_length() -> None:
    def splits(n: int, k: int, rows: int = 1, exact: bool = False) -> int:
        return choose(rows, (n, k), 8, 0, exact=exact)[1]

    assert [splits(4096, 4096), splits(2048, 14336), splits(128256, 4096), splits(64, 512)] == [2, 4, 1, 1]
    assert splits(4096, 14336, exact=True) == splits(4096, 14336, rows=17) == 1


@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_rows_are_independent_in_exact_mode(weights: str) -> None:
    matrix, x = torch.randn(70, 192), torch.randn(67, 192).to(torch.bfloat16)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        if weights == "dense":
            return linear(rows, matrix.to(torch.bfloat16), exact=True)
        return quantised_linear(rows, quantise(matrix, 8 if weights == "int8" else 4, 64), exact=True)

    whole = multiply(x)
    for rows in (1, 2, 16, 17, 64, 65):
        assert torch.equal(multiply(x[-rows:]), whole[-rows:]), rows


def test_parts_of_wider_tensors() -> None:
    wide, weight, out = torch.randn(3, 100), torch.randn(20, 32), torch.zeros(3, 50)
    linear(wide[:, 5:37], weight, exact=True, out=out[:, 10:30])
    torch.testing.assert_close(out[:, 10:30], wide[:, 5:37] @ weight.T, atol=1e-5, rtol=1e-5)
    assert not out[:, :10].any()
    assert not out[:, 30:].any()


def test_no_rows_and_what_does_not_fit() -> None:
    weight = torch.randn(20, 32)
    assert linear(torch.empty(0, 32), weight, exact=False).shape == (0, 20)
    with pytest.raises(ValueError, match="contiguous"):
        linear(torch.empty(2, 31), weight, exact=False)
    with pytest.raises(ValueError, match="groups of 24"):
        quantised_linear(torch.randn(1, 48), quantise(torch.randn(4, 48), 8, 24), exact=False)
