"""Linear layers as the compiled kernels read them: weights in panels of 32 outputs, scales, bias.

Integer weights come from `kernels.quantised_linear.quantise`, so that every implementation executes the same numbers:
- int8: whole numbers -127..127, one float32 scale for each output. They are widened to bfloat16 (exact) and multiplied
  with bfloat16 activations; sums and scaling are float32.
- int4: -8..7, one scale for each output and group of 32 inputs; otherwise as int8.
- int8-dynamic: the same weights as int8, and each row of activations rounded to -127..127 of its own largest magnitude;
  products are whole numbers, summed exactly.
kernels/cpu/src/quantised.h describes the order of bytes in a panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.linear import PANEL_COLUMNS, pack_weight
from kernels.quantised_linear import QuantisedWeight, quantise, unpack_int4

IntegerFormat = Literal["int8", "int4", "int8-dynamic"]

PLAIN_FORMAT = 0
FORMAT_CODES: dict[IntegerFormat, int] = {"int8": 1, "int4": 2, "int8-dynamic": 3}
INT4_GROUP = 32
# Rows are bytes about 128, and a product of two bytes stays below 2 ** 15: so many fit an int32 sum.
MAX_DYNAMIC_K = 2**16
_BYTE_OFFSET = 128


@dataclass(frozen=True)
class PackedLinear:
    """weight: panels. scales: float32 [k / group, n up to whole panels]. sums: int32, 128 times each column's sum."""

    weight: torch.Tensor
    n: int
    k: int
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    format: int = PLAIN_FORMAT
    group: int = 0

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> PackedLinear:
        """With its panels in memory that `place` chooses."""
        return replace(self, weight=place(self.weight))


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, integers: IntegerFormat | None = None
) -> PackedLinear:
    """Pack [n, k] as it is, or quantised first."""
    n, k = weight.shape
    if integers is None:
        return PackedLinear(pack_weight(weight), n, k, bias)
    quantised = quantise(weight, 4, INT4_GROUP) if integers == "int4" else quantise(weight, 8)
    return pack_quantised(quantised, bias, integers)


def pack_quantised(weight: QuantisedWeight, bias: torch.Tensor | None, integers: IntegerFormat) -> PackedLinear:
    """Pack a symmetric quantised weight. Raises ValueError where the compiled kernels have no form for it."""
    n, k = weight.shape
    if weight.zeros is not None:
        raise ValueError("the compiled kernels take symmetric weights only")
    if k % 4 or weight.group % 4:
        raise ValueError(f"k {k}, group {weight.group}: must be multiples of 4")
    scales = F.pad(weight.scales.T, (0, -n % PANEL_COLUMNS)).contiguous()
    packed = PackedLinear(
        weight=weight.values, n=n, k=k, bias=bias, scales=scales, format=FORMAT_CODES[integers], group=weight.group
    )
    if integers == "int4":
        return replace(packed, weight=_int4_panels(unpack_int4(weight.values)))
    if integers == "int8":
        return replace(packed, weight=_int8_panels(weight.values))
    if k > MAX_DYNAMIC_K or weight.group != k:
        raise ValueError(f"k {k}, group {weight.group}: int8-dynamic takes one group of at most {MAX_DYNAMIC_K}")
    rows = _panels(weight.values)
    sums = _BYTE_OFFSET * rows.sum((2,), dtype=torch.int32).flatten()
    quads = rows.view(len(rows), PANEL_COLUMNS, k // 4, 4).transpose(1, 2).contiguous()
    return replace(packed, weight=quads, sums=sums.contiguous())


def _panels(values: torch.Tensor) -> torch.Tensor:
    """int8 [n, k] to [panels, 32, k], missing columns zero."""
    padded = F.pad(values, (0, 0, 0, -len(values) % PANEL_COLUMNS))
    return padded.view(-1, PANEL_COLUMNS, values.shape[1])


def _in_byte_order(values: torch.Tensor, units_of_a_line: int) -> torch.Tensor:
    """int8 [n, k] to [panels, lines, units of a line, 64]."""
    rows = _panels(values)
    split = rows.view(len(rows), 2, 4, 4, -1, units_of_a_line, 2)  # half, quarter, column; line, unit, of the unit
    return split.permute(0, 4, 5, 2, 1, 3, 6).reshape(len(rows), -1, units_of_a_line, 64)


def _int8_panels(values: torch.Tensor) -> torch.Tensor:
    return _in_byte_order(values, 1).contiguous()


def _int4_panels(values: torch.Tensor) -> torch.Tensor:
    lines = (_in_byte_order(values, 2) + 8).to(torch.uint8)
    return (lines[:, :, 0] | lines[:, :, 1] << 4).contiguous()
