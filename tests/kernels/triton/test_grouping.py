"""Rows sorted by group: every row once, in order, in tiles of its own group, within the bounds the host set."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.grouping import group_rows


def check(index: torch.Tensor, num_groups: int, block_rows: int) -> None:
    groups = group_rows(index, num_groups, block_rows)
    owners = groups.tile_groups.tolist()
    used = [group for group in owners if group >= 0]
    assert owners == used + [-1] * (len(owners) - len(used))
    assert used == sorted(used)
    found: dict[int, list[int]] = {}
    for tile, group in enumerate(used):
        found.setdefault(group, []).extend(groups.rows[tile * block_rows : (tile + 1) * block_rows].tolist())
    for group in range(num_groups):
        rows = torch.nonzero(index == group)[:, 0].tolist()
        filled = rows + [len(index)] * (-len(rows) % block_rows)
        assert found.get(group, []) == filled


@pytest.mark.parametrize("block_rows", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("num_groups", [1, 3, 13])
def test_random_groups(rows: int, num_groups: int, block_rows: int) -> None:
    check(torch.randint(-1, num_groups, (rows,), dtype=torch.int32), num_groups, block_rows)


def test_one_group_has_all_and_none_has_any() -> None:
    for group in (-1, 0, 4):
        check(torch.full((19,), group, dtype=torch.int32), 5, 8)


def test_rows_over_several_chunks() -> None:
    check(torch.randint(0, 3, (2100,), dtype=torch.int32), 3, 16)


def test_no_rows() -> None:
    assert group_rows(torch.empty(0, dtype=torch.int32), 3, 16).num_tiles == 0


def test_refuses_odd_tiles_and_no_groups() -> None:
    for num_groups, block_rows in ((0, 16), (5000, 16), (3, 12)):
        with pytest.raises(ValueError, match=f"{num_groups} groups in tiles of {block_rows}"):
            group_rows(torch.zeros(4, dtype=torch.int32), num_groups, block_rows)
