"""Linear layers: packed kernel against torch with each epilogue; rows never influence each other."""

from __future__ import annotations

import pytest
import torch

from kernels import linear as reference
from kernels.cpu import library
from kernels.cpu.library import Epilogue
from kernels.cpu.packing import pack_linear
from kernels.cpu.structs import linear_struct

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 5, 11, 12, 13, 24, 25, 64, 301]
SHAPES = [(32, 16), (48, 64), (960, 576), (33, 30), (576, 1536)]


def native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, threads: int = 2) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan)
    packed = pack_linear(weight, bias)
    library.linear(x, linear_struct(packed), Epilogue.STORE, out, num_threads=threads)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 13, 130])
def test_store(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    bias = torch.randn(shape[0])
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(native(x, weight, bias).double(), expected, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [16, 32, 48, 576])
def test_add(n: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(n, 64).to(dtype), torch.randn(9, 64).to(dtype)
    residual = torch.randn(9, n)
    out = residual.clone()
    packed = pack_linear(weight)
    library.linear(x, linear_struct(packed), Epilogue.ADD, out, num_threads=2)
    torch.testing.assert_close(out, residual + x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [16, 48, 1536])
def test_silu_mul(n: int, dtype: torch.dtype) -> None:
    gate, up, x = torch.randn(n, 64).to(dtype), torch.randn(n, 64).to(dtype), torch.randn(14, 64).to(dtype) * 4
    out = torch.full((14, n), torch.nan, dtype=dtype)
    packed = pack_linear(reference.interleave_gate_up(gate, up))
    library.linear(x, linear_struct(packed), Epilogue.SILU_MUL, out, num_threads=2)
    expected = reference.silu_mul(x.float() @ gate.float().T, x.float() @ up.float().T)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536)])
def test_rows_are_independent(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(301, shape[1]).to(dtype)
    for multiply in (native, reference.linear):
        expected = multiply(x, weight)
        for rows in ROWS:
            assert torch.equal(multiply(x[-rows:].clone(), weight), expected[-rows:]), f"{multiply} {rows}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_vocabulary_head_are_independent(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8192, 576).to(dtype), torch.randn(257, 576).to(dtype)
    for multiply in (native, reference.linear):
        expected = multiply(x, weight)
        for rows in [*range(1, 65), 100, 127, 200, 256]:
            assert torch.equal(multiply(x[-rows:].clone(), weight), expected[-rows:]), f"{multiply} {rows}"


def test_packing_keeps_every_word() -> None:
    weight = torch.randn(33, 6)
    packed = reference.pack_weight(weight)
    assert packed.shape == (2, 6, 32)
    restored = packed.view(torch.float32).transpose(1, 2).reshape(64, 6)
    assert torch.equal(restored[:33], weight)
    assert not restored[33:].any()
