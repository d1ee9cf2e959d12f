"""Linear layers with integer weights: the compiled forms against the reference, rows never influencing each other."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import Epilogue
from kernels.cpu.packing import IntegerFormat, pack_linear, pack_quantised
from kernels.cpu.structs import linear_struct
from kernels.linear import interleave_gate_up, silu_mul
from kernels.quantised_linear import quantise, quantised_linear

FORMATS: list[IntegerFormat] = ["int8", "int4", "int8-dynamic"]
SHAPES = [(32, 32), (33, 64), (96, 576)]
# Of the magnitude of a sum of some hundred products, rounded to float32 in another order.
TOLERANCE = 2e-4


def compiled(
    x: torch.Tensor, weight: torch.Tensor, integers: IntegerFormat, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan)
    packed = pack_linear(weight, bias, integers)
    library.linear(x, linear_struct(packed), Epilogue.STORE, out, num_threads=2)
    return out


def expected(
    x: torch.Tensor, weight: torch.Tensor, integers: IntegerFormat, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What the format says, in torch."""
    quantised = quantise(weight, 4, 32) if integers == "int4" else quantise(weight, 8)
    if integers != "int8-dynamic":
        return quantised_linear(x, quantised, bias)
    rows = x.float()
    peaks = rows.abs().amax(1, keepdim=True)
    whole = (rows * (torch.full_like(peaks, 127) / peaks)).round()
    product = (whole.double() @ quantised.values.double().T).float() * quantised.scales[:, 0] * (peaks / 127)
    return product if bias is None else product + bias


@pytest.mark.parametrize("integers", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 17, 40])
def test_agrees_with_the_format(shape: tuple[int, int], rows: int, integers: IntegerFormat) -> None:
    weight, x = torch.randn(shape).bfloat16(), torch.randn(rows, shape[1]).bfloat16()
    bias = torch.randn(shape[0])
    found = compiled(x, weight, integers, bias)
    torch.testing.assert_close(found, expected(x, weight, integers, bias), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("integers", FORMATS)
def test_every_whole_number_is_exact(integers: IntegerFormat) -> None:
    """One-hot rows read the weights back: all of -127..127 (INT4: -8..7) in all columns of a panel."""
    least, most = (-8, 7) if integers == "int4" else (-127, 127)
    values = torch.arange(64 * 32).reshape(32, 64).remainder(most - least + 1) + least
    values[:, ::32] = least  # every group's largest magnitude, so that its scale is one
    rows = torch.eye(64).bfloat16()
    found = compiled(rows, values.bfloat16(), integers)
    assert torch.equal(found.T.round(), values.float())
    torch.testing.assert_close(found.T, values.float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("integers", FORMATS)
def test_rows_are_independent(integers: IntegerFormat) -> None:
    weight, x = torch.randn(96, 576).bfloat16(), torch.randn(130, 576).bfloat16()
    whole = compiled(x, weight, integers)
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 31, 64):
        assert torch.equal(compiled(x[-rows:].clone(), weight, integers), whole[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("integers", FORMATS)
def test_gated(integers: IntegerFormat) -> None:
    gate, up, x = torch.randn(48, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(14, 64).bfloat16()
    out = torch.full((14, 48), torch.nan, dtype=torch.bfloat16)
    packed = pack_linear(interleave_gate_up(gate, up), None, integers)
    library.linear(x, linear_struct(packed), Epilogue.SILU_MUL, out, num_threads=2)
    wanted = silu_mul(expected(x, gate, integers), expected(x, up, integers))
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


def test_rows_of_zeros() -> None:
    """A row without magnitude has no scale."""
    assert not compiled(torch.zeros(3, 64).bfloat16(), torch.randn(32, 64).bfloat16(), "int8-dynamic").any()


def test_what_has_no_form_is_refused() -> None:
    weight = torch.randn(32, 64)
    with pytest.raises(ValueError, match="symmetric"):
        pack_quantised(quantise(weight, 4, 32, asymmetric=True), None, "int4")
    with pytest.raises(ValueError, match="one group"):
        pack_quantised(quantise(weight, 8, 32), None, "int8-dynamic")
    with pytest.raises(ValueError, match="multiple"):
        pack_linear(torch.randn(32, 48), None, "int4")
