"""Matrix products of rows with the weights of their groups: experts of a mixture, adapters of a batch.

One program computes a tile of one group's rows (grouping.py) by some of the outputs. Optionally the weight holds gate
and up, and what is stored is the gated activation; optionally the sum over k is split in a number of parts that depends
on k alone, stored apart. Neither changes what a row's sum is when other rows come or go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.triton.activation import gated_multiply
from kernels.triton.dot import dot
from kernels.triton.grouping import Groups
from kernels.triton.linear_configs import Tile
from kernels.triton.registry import KernelConfig, pointer


@triton.jit(do_not_specialize=("num_rows", "num_tiles"))
def grouped_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tile_groups_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    split_stride: tl.tensor,
    split_tiles: tl.tensor,
    ROWS_PER_X: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile, column_tile, split = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles, tl.program_id(1)
    group = tl.load(tile_groups_ptr + tile)
    if group < 0:
        return
    row = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    in_rows, in_columns = row[:, None] < num_rows, column[None, :] < n
    own = weight_ptr + group.to(tl.int64) * (2 * n if GATED else n) * k
    x_tile = x_ptr + (row // ROWS_PER_X)[:, None] * x_stride + inner[None, :]
    weight_tile = own + column[None, :].to(tl.int64) * k + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = split * split_tiles
    for step in range(first, tl.minimum(first + split_tiles, tl.cdiv(k, BLOCK_K))):
        start = step * BLOCK_K
        in_k = inner + start < k
        x = tl.load(x_tile + start, mask=in_rows if EVEN_K else in_rows & in_k[None, :], other=0.0)
        weight_mask = in_columns if EVEN_K else in_columns & in_k[:, None]
        weight = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        total = dot(x, weight, total)
        if GATED:
            up_weight = tl.load(weight_tile + n.to(tl.int64) * k + start, mask=weight_mask, other=0.0)
            up_total = dot(x, up_weight, up_total)
    if GATED:
        total = gated_multiply(total, up_total, GELU)
    target = out_ptr + split.to(tl.int64) * split_stride + row[:, None] * n + column[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=in_rows & in_columns)


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """What is computed: rows_per_x consecutive rows read one row of x; gated: by that activation."""

    tile: Tile
    rows_per_x: int = 1
    gated: Activation | None = None
    splits: int = 1

    def constants(self, k: int) -> dict[str, object]:
        """The kernel's constexpr arguments."""
        return {
            "ROWS_PER_X": self.rows_per_x,
            "GATED": self.gated is not None,
            "GELU": self.gated == "gelu_tanh",
            "EVEN_K": k % self.tile.inner == 0,
            "BLOCK_M": self.tile.rows,
            "BLOCK_N": self.tile.outputs,
            "BLOCK_K": self.tile.inner,
        }


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, groups: Groups, num_rows: int, product: GroupedProduct, dtype: torch.dtype
) -> torch.Tensor:
    """x [num_rows / rows_per_x, k] and weight [groups, n or 2 n, k], contiguous, of one dtype.

    Returns [splits, num_rows, n] in `dtype`; rows that are in no group are not written.
    """
    k = x.shape[1]
    n = weight.shape[1] // (2 if product.gated else 1)
    tile = product.tile
    if weight.shape[2] != k or x.stride(1) != 1 or not weight.is_contiguous() or tile.rows != groups.block_rows:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, tiles of {groups.block_rows}: unfit")
    out = torch.empty(product.splits, num_rows, n, dtype=dtype, device=x.device)
    if num_rows:
        grouped_linear_kernel[(groups.num_tiles * triton.cdiv(n, tile.outputs), product.splits)](
            x,
            weight,
            groups.rows,
            groups.tile_groups,
            out,
            num_rows,
            groups.num_tiles,
            n,
            k,
            x.stride(0),
            out.stride(0),
            triton.cdiv(triton.cdiv(k, tile.inner), product.splits),
            **product.constants(k),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def shipped(name: str, product: GroupedProduct, out: torch.dtype) -> KernelConfig:
    """The form for BF16 and a k that is a multiple of the tile's."""
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr"), pointer(torch.bfloat16)),
        **dict.fromkeys(("rows_ptr", "tile_groups_ptr"), pointer(torch.int32)),
        "out_ptr": pointer(out),
        **dict.fromkeys(("num_rows", "num_tiles", "n", "k", "x_stride", "split_stride", "split_tiles"), "i32"),
    }
    aligned = (*(n for n in signature if n.endswith("_ptr")), "n", "k", "x_stride", "split_stride")
    return KernelConfig(
        name,
        grouped_linear_kernel,
        signature,
        product.constants(product.tile.inner),
        aligned,
        num_warps=product.tile.num_warps,
        num_stages=product.tile.num_stages,
    )
