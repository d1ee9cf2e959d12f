"""Rows sorted by the group (expert, adapter) whose weights they meet, in whole tiles, without asking the host.

Each group's rows fill tiles of `block_rows` of their own; the last one is filled up. Buffers have the size of the worst
case, which the host knows; which tiles exist and whose they are is read on the device. Within a group rows keep their
order, so the result is the same on each run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.registry import KernelConfig, pointer

_CHUNK = 1024
_NUM_WARPS = 4
_MAX_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class Groups:
    """Tiles of rows. rows: int32 [tiles * block_rows], row numbers, or the number of rows for places left empty.

    tile_groups: int32 [tiles], the group each tile belongs to, -1 for tiles that are not used.
    """

    rows: torch.Tensor
    tile_groups: torch.Tensor
    block_rows: int

    @property
    def num_tiles(self) -> int:
        return self.tile_groups.shape[0]


@triton.jit(do_not_specialize=("num_rows",))
def count_kernel(index_ptr: tl.tensor, count_ptr: tl.tensor, num_rows: tl.tensor, CHUNK: tl.constexpr) -> None:
    group = tl.program_id(0)
    counts = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_rows, CHUNK):
        row = start + tl.arange(0, CHUNK)
        index = tl.load(index_ptr + row, mask=row < num_rows, other=-1)
        counts += (index == group).to(tl.int32)
    tl.store(count_ptr + group, tl.sum(counts, 0))


@triton.jit(do_not_specialize=("num_rows", "num_tiles"))
def place_kernel(
    index_ptr: tl.tensor,
    count_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tile_groups_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_groups: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program for each group, and one more for the tiles that nobody uses."""
    group = tl.program_id(0)
    others = tl.arange(0, GROUPS)
    counts = tl.load(count_ptr + others, mask=others < num_groups, other=0)
    tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.sum(tl.where(others < group, tiles, 0), 0)
    count = tl.sum(tl.where(others == group, counts, 0), 0)
    last = num_tiles if group == num_groups else first + (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    owner = tl.where(group == num_groups, -1, group)
    for start in range(first, last, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        tl.store(tile_groups_ptr + tile, tl.zeros((CHUNK,), tl.int32) + owner, mask=tile < last)
    if group < num_groups:
        placed = first * BLOCK_ROWS
        for start in range(0, num_rows, CHUNK):
            row = start + tl.arange(0, CHUNK)
            own = (tl.load(index_ptr + row, mask=row < num_rows, other=-1) == group).to(tl.int32)
            tl.store(rows_ptr + placed + tl.cumsum(own, 0) - 1, row, mask=own > 0)
            placed += tl.sum(own, 0)
        empty = placed + tl.arange(0, BLOCK_ROWS)
        filler = tl.zeros((BLOCK_ROWS,), tl.int32) + num_rows
        tl.store(rows_ptr + empty, filler, mask=empty < last * BLOCK_ROWS)


def group_rows(index: torch.Tensor, num_groups: int, block_rows: int) -> Groups:
    """Sort rows by `index` int32 [P], each the row's group; rows of other values, -1 for one, are left out."""
    if not 0 < num_groups <= _MAX_GROUPS or block_rows & (block_rows - 1):
        raise ValueError(f"{num_groups} groups in tiles of {block_rows} rows: at most {_MAX_GROUPS}, a power of two")
    rows, device = index.numel(), index.device
    tiles = (rows + (block_rows - 1) * min(rows, num_groups)) // block_rows
    groups = Groups(
        torch.empty(tiles * block_rows, dtype=torch.int32, device=device),
        torch.empty(tiles, dtype=torch.int32, device=device),
        block_rows,
    )
    if not rows:
        return groups
    counts = torch.empty(num_groups, dtype=torch.int32, device=device)
    count_kernel[(num_groups,)](index, counts, rows, CHUNK=_CHUNK, num_warps=_NUM_WARPS)
    place_kernel[(num_groups + 1,)](
        index,
        counts,
        groups.rows,
        groups.tile_groups,
        rows,
        num_groups,
        tiles,
        BLOCK_ROWS=block_rows,
        GROUPS=triton.next_power_of_2(num_groups),
        CHUNK=_CHUNK,
        num_warps=_NUM_WARPS,
    )
    return groups


_INDEX = pointer(torch.int32)
SHIPPED = [
    KernelConfig(
        "group-count",
        count_kernel,
        {"index_ptr": _INDEX, "count_ptr": _INDEX, "num_rows": "i32"},
        {"CHUNK": _CHUNK},
        ("index_ptr", "count_ptr"),
        num_warps=_NUM_WARPS,
    ),
    *(
        KernelConfig(
            f"group-place-{block_rows}",
            place_kernel,
            {
                **dict.fromkeys(("index_ptr", "count_ptr", "rows_ptr", "tile_groups_ptr"), _INDEX),
                **dict.fromkeys(("num_rows", "num_groups", "num_tiles"), "i32"),
            },
            {"BLOCK_ROWS": block_rows, "GROUPS": 128, "CHUNK": _CHUNK},
            ("index_ptr", "count_ptr", "rows_ptr", "tile_groups_ptr"),
            num_warps=_NUM_WARPS,
        )
        for block_rows in (16, 128)
    ),
]
