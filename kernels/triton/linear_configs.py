"""Launch configurations of linear layers, by number of rows and format of the weight; and when sums are split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton

# Programs that keep an H100-sized device (132 processors) busy; more splits than this buy nothing.
_FULL_DEVICE = 264
_MAX_SPLITS = 8
_MIN_SPLIT_TILES = 8
DECODE_ROWS = 16
MIDDLE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, outputs and inner length of one program's step, and its launch options."""

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int


# By format of the weight: bits, and "g" where groups along k are scaled (a second accumulator). Chosen by what the
# compiler reports (no spills, shared memory; kernels/triton/compile prints them) and by the bytes in flight.
DECODE = {
    "16": Tile(16, 32, 128, 4, 5),
    "8": Tile(16, 32, 128, 4, 5),
    "8g": Tile(16, 32, 128, 4, 5),
    "4": Tile(16, 32, 128, 4, 5),
    "4g": Tile(16, 64, 128, 4, 5),
}
MIDDLE = {
    "16": Tile(64, 64, 128, 4, 4),
    "8": Tile(64, 64, 128, 4, 4),
    "8g": Tile(64, 64, 128, 8, 4),
    "4": Tile(64, 64, 128, 8, 4),
    "4g": Tile(64, 64, 64, 8, 5),
}
PREFILL = {
    "16": Tile(128, 128, 64, 8, 3),
    "8": Tile(128, 128, 64, 8, 3),
    "8g": Tile(128, 64, 64, 8, 3),
    "4": Tile(128, 128, 64, 8, 3),
    "4g": Tile(128, 64, 64, 8, 3),
}
EXACT = {
    "16": Tile(64, 64, 64, 8, 4),
    "8": Tile(32, 64, 128, 4, 4),
    "8g": Tile(32, 64, 128, 4, 4),
    "4": Tile(32, 64, 128, 4, 4),
    "4g": Tile(32, 64, 128, 4, 4),
}
_MAX_STAGES = 6
# A group shorter than this is scaled inside the tile, each weight rounded to the activations' dtype.
_MIN_INNER = 64


def choose(rows: int, shape: tuple[int, int], bits: int, group: int, *, exact: bool) -> tuple[Tile, int]:
    """Tile and number of splits for `rows` times a weight [n, k]; in exact mode neither depends on the rows."""
    if exact:
        return fitted(EXACT, bits, group), 1
    if rows > DECODE_ROWS:
        return fitted(MIDDLE if rows <= MIDDLE_ROWS else PREFILL, bits, group), 1
    tile, (n, k) = fitted(DECODE, bits, group), shape
    programs = triton.cdiv(n, tile.outputs)
    wanted = min(_FULL_DEVICE // programs, triton.cdiv(k, tile.inner) // _MIN_SPLIT_TILES, _MAX_SPLITS)
    return tile, 1 << max(wanted.bit_length() - 1, 0)


def fitted(table: dict[str, Tile], bits: int, group: int) -> Tile:
    """The format's tile, its inner length made to divide a group or to be divided by one."""
    tile = table[f"{bits}g" if group else str(bits)]
    power = group & -group
    if not group or (power < _MIN_INNER and group == power):
        return tile
    if power < (32 if bits == 4 else 16):
        raise ValueError(f"groups of {group} values: not a multiple of 16 (INT4: 32)")
    inner = min(tile.inner, power)
    return replace(tile, inner=inner, num_stages=min(tile.num_stages * tile.inner // inner, _MAX_STAGES))
