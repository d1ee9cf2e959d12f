"""Linear layers with INT8 and INT4 weights: the launcher of linear.py's kernel for them, and its shipped forms."""

from __future__ import annotations

import torch

from kernels.quantised_linear import QuantisedWeight
from kernels.triton.linear import Operand, multiply, shipped
from kernels.triton.linear_configs import DECODE, EXACT, MIDDLE, PREFILL

# Bits, group (0: one scale for each output) and zeros of the formats whose forms are compiled ahead of time; those left
# out need less of everything.
FORMATS: tuple[tuple[int, int, bool], ...] = ((8, 0, False), (4, 128, True), (4, 64, False), (4, 32, True))


def operand(weight: QuantisedWeight) -> Operand:
    """What the kernel takes; a single group is the same as one scale for each output."""
    n, k = weight.shape
    return Operand(
        weight.values, n, k, weight.bits, weight.group if weight.group < k else 0, weight.scales, weight.zeros
    )


def quantised_linear(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None = None,
    *,
    exact: bool,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, k] times the weight transposed plus bias [n], in `dtype` or into `out` [T, n]; rows may lie apart."""
    return multiply(x, operand(weight), bias, exact=exact, dtype=dtype, out=out)


SHIPPED = [
    shipped(
        f"linear-{path}-int{bits}-{f'group{group}' if group else 'channel'}{'-zeros' if zeros else ''}",
        table,
        bits,
        group=group,
        zeros=zeros,
    )
    for path, table in (("decode", DECODE), ("middle", MIDDLE), ("prefill", PREFILL), ("exact", EXACT))
    for bits, group, zeros in FORMATS
]
