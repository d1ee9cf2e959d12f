"""Linear layers on tensor cores: weights of 16 (or 32) bits, INT8 and INT4 by one kernel, sums in float32.

Quantised weights meet the activations as the whole numbers they are, less their zero, which the activations' dtype
holds exactly where the zero is whole (and rounds elsewhere); each group's partial sum is then scaled. Groups shorter
than 64 are scaled before the product, and rounded. kernels/quantised_linear.py has the format and the specification.

A few rows are bound by reading the weights: narrow tiles, and the sum over k split between programs where the outputs
alone would not fill the device; the parts are added in a fixed order by a second kernel. **Exact**: one tile shape
whatever the number of rows and no split, so that a row's sum is always the same sequence of operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.dot import dot
from kernels.triton.linear_configs import DECODE, EXACT, MIDDLE, PREFILL, Tile, choose, fitted
from kernels.triton.registry import KernelConfig, pointer
from kernels.triton.weight_tiles import converted, less_zero, nibbles, scaled

_SUM_BLOCK = 1024
# Tiles of rows that share a stripe of weight tiles, for the second-level cache.
_STRIPE = 8


# What follows from the number of rows is no reason to compile again.
@triton.jit(do_not_specialize=("rows", "split_tiles"))
def linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    split_tiles: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPE: tl.constexpr,
) -> None:
    row_tile, column_tile = _swizzle(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N), STRIPE)
    split = tl.program_id(1)
    row = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = row[:, None] < rows, column[None, :] < n
    if BITS == 4:
        byte = tl.arange(0, BLOCK_K // 2)
        inner = byte // 16 * 32 + byte % 16
        weight_row = k // 2
    else:
        byte = tl.arange(0, BLOCK_K)
        inner = byte
        weight_row = k
    x_tile = x_ptr + row[:, None] * x_stride + inner[None, :]
    weight_tile = weight_ptr + column[None, :] * weight_row + byte[:, None]
    IN_TILE: tl.constexpr = GROUP > 0 and GROUP < BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if zero_ptr is not None and GROUP == 0:
        zero = tl.load(zero_ptr + column, mask=column < n, other=0.0)
    first = split * split_tiles
    for tile in range(first, tl.minimum(first + split_tiles, tl.cdiv(k, BLOCK_K))):
        start = tile * BLOCK_K
        in_k = inner + start < k
        x_mask = in_rows if EVEN_K else in_rows & in_k[None, :]
        weight_mask = in_columns if EVEN_K else in_columns & in_k[:, None]
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_tile + (start // 2 if BITS == 4 else start), mask=weight_mask, other=0)
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if GROUP >= BLOCK_K else total
        place = column * (k // GROUP) + start // GROUP if GROUP >= BLOCK_K else column
        if zero_ptr is not None and GROUP >= BLOCK_K:
            zero = tl.load(zero_ptr + place, mask=column < n, other=0.0)
        if BITS == 4:
            low, high = nibbles(weight, x.dtype)
            if IN_TILE:
                low = scaled(low, scale_ptr, zero_ptr, column, start, n, k, GROUP, 2)
                high = scaled(high, scale_ptr, zero_ptr, column, start, n, k, GROUP, 2)
            elif zero_ptr is not None:
                low, high = less_zero(low, zero), less_zero(high, zero)
            x_high = tl.load(x_tile + start + 16, mask=x_mask, other=0.0)
            part = dot(x, low.to(x.dtype), part)
            part = dot(x_high, high.to(x.dtype), part)
        else:
            if IN_TILE:
                weight = scaled(weight, scale_ptr, zero_ptr, column, start, n, k, GROUP, 1)
            weight = converted(weight, x.dtype)
            if zero_ptr is not None and not IN_TILE:
                weight = less_zero(weight, zero)
            part = dot(x, weight, part)
        if GROUP >= BLOCK_K:
            total += part * tl.load(scale_ptr + place, mask=column < n, other=0.0)[None, :]
        else:
            total = part
    if GROUP == 0 and scale_ptr is not None:
        total *= tl.load(scale_ptr + column, mask=column < n, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + split.to(tl.int64) * split_stride + row[:, None] * out_stride + column[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=in_rows & in_columns)


@triton.jit
def _swizzle(program: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, STRIPE: tl.constexpr) -> tl.tensor:
    """Programs in stripes of STRIPE row tiles, all columns of a stripe before the next."""
    stripe = program // (STRIPE * column_tiles)
    height = tl.minimum(row_tiles - stripe * STRIPE, STRIPE)
    within = program % (STRIPE * column_tiles)
    return stripe * STRIPE + within % height, within // height


@triton.jit
def sum_splits_kernel(
    part_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(part_ptr + split * split_stride + row * n + column, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Operand:
    """A weight [n, k] as the kernel takes it. group 0: one scale for each output, or none at all."""

    values: torch.Tensor
    n: int
    k: int
    bits: int
    group: int = 0
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    exact: bool,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, k] times weight [n, k] transposed plus bias [n], as kernels.linear.linear, in `dtype` or into `out` [T, n].

    x and weight share a dtype; rows of x and of out may lie apart.
    """
    n, k = weight.shape
    return multiply(x, Operand(weight, n, k, 16), bias, exact=exact, dtype=dtype, out=out)


def multiply(
    x: torch.Tensor,
    weight: Operand,
    bias: torch.Tensor | None,
    *,
    exact: bool,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernels for x [T, k] and a weight in any of the formats."""
    rows, k = x.shape
    if k != weight.k or x.stride(1) != 1 or not weight.values.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and weight {weight.n, weight.k}: contiguous rows of one length each")
    if out is None:
        out = torch.empty(rows, weight.n, dtype=dtype, device=x.device)
    if not rows:
        return out
    tile, splits = choose(rows, (weight.n, k), weight.bits, weight.group, exact=exact)
    if splits == 1:
        _launch(x, weight, bias, out, tile, 1)
        return out
    parts = torch.empty(splits, rows, weight.n, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, parts, tile, splits)
    sum_splits_kernel[(rows, triton.cdiv(weight.n, _SUM_BLOCK))](
        parts, bias, out, weight.n, out.stride(0), parts.stride(0), SPLITS=splits, BLOCK=_SUM_BLOCK
    )
    return out


def _launch(
    x: torch.Tensor, weight: Operand, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, splits: int
) -> None:
    rows = len(x)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(weight.n, tile.outputs), splits)
    linear_kernel[grid](
        x,
        weight.values,
        weight.scales,
        weight.zeros,
        bias,
        out,
        rows,
        weight.n,
        weight.k,
        x.stride(0),
        out.stride(-2),
        out.stride(0) if splits > 1 else 0,
        triton.cdiv(triton.cdiv(weight.k, tile.inner), splits),
        **_constants(weight.bits, weight.group, weight.k, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(bits: int, group: int, k: int, tile: Tile) -> dict[str, object]:
    return {
        "BITS": bits,
        "GROUP": group,
        "EVEN_K": k % tile.inner == 0,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inner,
        "STRIPE": _STRIPE,
    }


def shipped(name: str, table: dict[str, Tile], bits: int, *, group: int = 0, zeros: bool = False) -> KernelConfig:
    """The form for BF16 activations and a k that is a multiple of the tile's."""
    tile = fitted(table, bits, group)
    values = {4: torch.uint8, 8: torch.int8, 16: torch.bfloat16}[bits]
    signature = {
        "x_ptr": pointer(torch.bfloat16),
        "weight_ptr": pointer(values),
        "out_ptr": pointer(torch.float32),
        **dict.fromkeys(("rows", "n", "k", "x_stride", "out_stride", "split_stride", "split_tiles"), "i32"),
    }
    constants = _constants(bits, group, tile.inner, tile) | {"bias_ptr": None}
    for argument, given in (("scale_ptr", bits < 16), ("zero_ptr", zeros)):
        if given:
            signature[argument] = pointer(torch.float32)
        else:
            constants[argument] = None
    aligned = (*(n for n in signature if n.endswith("_ptr")), "n", "k", "x_stride", "out_stride", "split_stride")
    return KernelConfig(
        name, linear_kernel, signature, constants, aligned, num_warps=tile.num_warps, num_stages=tile.num_stages
    )


SHIPPED = [
    *(
        shipped(f"linear-{name}-bf16", table, 16)
        for name, table in (("decode", DECODE), ("middle", MIDDLE), ("prefill", PREFILL), ("exact", EXACT))
    ),
    KernelConfig(
        "linear-sum-4",
        sum_splits_kernel,
        {
            "part_ptr": pointer(torch.float32),
            "out_ptr": pointer(torch.float32),
            **dict.fromkeys(("n", "out_stride", "split_stride"), "i32"),
        },
        {"bias_ptr": None, "SPLITS": 4, "BLOCK": _SUM_BLOCK},
        ("part_ptr", "out_ptr", "n", "out_stride", "split_stride"),
    ),
]
