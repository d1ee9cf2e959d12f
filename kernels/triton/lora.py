"""Adapters of a mixed batch in two launches for each layer, as kernels/lora.py specifies: shrink, then expand and add.

Tokens are sorted by adapter once a step (`plan`), for all layers. Shrinking sums over the long k for few outputs, so k
is split in a number of parts that depends on k alone; expanding adds the parts in order. Batching by adapter comes from
Punica and S-LoRA (Chen et al. and Sheng et al., 2023). **Exact**: one shape of tile whatever the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.lora import Adapters
from kernels.triton.dot import dot
from kernels.triton.grouped_linear import GroupedProduct, grouped_linear, shipped
from kernels.triton.grouping import Groups, group_rows
from kernels.triton.linear_configs import Tile
from kernels.triton.registry import KernelConfig, pointer

MAX_RANK = 128
_MIN_RANK = 16
_MAX_SPLITS = 8
_SPLIT_LENGTH = 512
# By rows of a tile: few tokens for each adapter, and many.
SHRINK = {16: Tile(16, 16, 128, 4, 4), 64: Tile(64, 32, 64, 4, 4)}
EXPAND = {16: Tile(16, 64, 0, 4, 2), 64: Tile(64, 64, 0, 8, 2)}
_MANY_TOKENS = 32
_EXACT_ROWS = 16


@triton.jit(do_not_specialize=("num_rows", "num_tiles"))
def expand_kernel(
    low_ptr: tl.tensor,
    up_ptr: tl.tensor,
    scaling_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tile_groups_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    n: tl.tensor,
    rank: tl.tensor,
    out_stride: tl.tensor,
    split_stride: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK: tl.constexpr,
) -> None:
    tile, column_tile = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    adapter = tl.load(tile_groups_ptr + tile)
    if adapter < 0:
        return
    row = tl.load(rows_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, RANK)
    low_mask = (row[:, None] < num_rows) & (inner[None, :] < rank)
    low = tl.zeros((BLOCK_M, RANK), tl.float32)
    for split in range(SPLITS):
        part = low_ptr + split * split_stride + row[:, None] * rank + inner[None, :]
        low += tl.load(part, mask=low_mask, other=0.0)
    up_tile = up_ptr + (adapter.to(tl.int64) * n + column[None, :]) * rank + inner[:, None]
    up = tl.load(up_tile, mask=(column[None, :] < n) & (inner[:, None] < rank), other=0.0)
    gain = dot(low.to(up.dtype), up, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * tl.load(scaling_ptr + adapter)
    target = out_ptr + row[:, None] * out_stride + column[None, :]
    mask = (row[:, None] < num_rows) & (column[None, :] < n)
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + gain
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


def plan(index: torch.Tensor, num_adapters: int, *, exact: bool) -> Groups:
    """Sort a step's tokens by adapter, int32 [T], -1 for none; the same for every layer."""
    many = index.numel() > _MANY_TOKENS * num_adapters and not exact
    return group_rows(index, num_adapters, max(SHRINK) if many else _EXACT_ROWS)


def add_lora(out: torch.Tensor, x: torch.Tensor, adapters: Adapters, groups: Groups) -> None:
    """Add to out [T, n] in place what the adapters make of x [T, k]; rows of out and x may lie apart."""
    tokens, k = x.shape
    n, rank = adapters.up.shape[1:]
    if not 0 < rank <= MAX_RANK or out.shape != (tokens, n) or out.stride(1) != 1 or not adapters.up.is_contiguous():
        raise ValueError(f"rank {rank} of at most {MAX_RANK}, out {tuple(out.shape)} for {tokens} rows of {n}")
    if not tokens:
        return
    shrink = GroupedProduct(SHRINK[groups.block_rows], splits=num_splits(k))
    low = grouped_linear(x, adapters.down, groups, tokens, shrink, torch.float32)
    tile = EXPAND[groups.block_rows]
    expand_kernel[(groups.num_tiles * triton.cdiv(n, tile.outputs),)](
        low,
        adapters.up,
        adapters.scaling,
        groups.rows,
        groups.tile_groups,
        out,
        tokens,
        groups.num_tiles,
        n,
        rank,
        out.stride(0),
        low.stride(0),
        **_expand_constants(tile, rank, shrink.splits),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def num_splits(k: int) -> int:
    """Parts of the sum over k; of k alone."""
    wanted = min(k // _SPLIT_LENGTH, _MAX_SPLITS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _expand_constants(tile: Tile, rank: int, splits: int) -> dict[str, object]:
    padded = max(triton.next_power_of_2(rank), _MIN_RANK)
    return {"SPLITS": splits, "BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "RANK": padded}


def _shipped_expand(rows: int, rank: int) -> KernelConfig:
    tile = EXPAND[rows]
    signature = {
        **dict.fromkeys(("low_ptr", "scaling_ptr", "out_ptr"), pointer(torch.float32)),
        "up_ptr": pointer(torch.bfloat16),
        **dict.fromkeys(("rows_ptr", "tile_groups_ptr"), pointer(torch.int32)),
        **dict.fromkeys(("num_rows", "num_tiles", "n", "rank", "out_stride", "split_stride"), "i32"),
    }
    aligned = (*(n for n in signature if n.endswith("_ptr")), "n", "rank", "out_stride", "split_stride")
    return KernelConfig(
        f"lora-expand-{rows}-rank{rank}",
        expand_kernel,
        signature,
        _expand_constants(tile, rank, _MAX_SPLITS),
        aligned,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


SHIPPED = [
    *(
        shipped(f"lora-shrink-{rows}", GroupedProduct(tile, splits=_MAX_SPLITS), torch.float32)
        for rows, tile in SHRINK.items()
    ),
    *(_shipped_expand(rows, rank) for rows in EXPAND for rank in (16, MAX_RANK)),
]
