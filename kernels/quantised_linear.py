"""Linear layers with INT8 or INT4 weights and full-precision activations: the packing, and the product in plain torch.

Format, shared by every implementation. A weight [n, k] is cut along k into groups of `group` values (group = k: one
scale for each output); the group's values are (q - zero) * scale.
- INT8: `values` int8 [n, k]; zero is 0.
- INT4: `values` uint8 [n, k / 2], q + 8 in four bits, q in -8..7. k is cut into packs of 32: byte j of a pack (j < 16)
  holds value j in its low half and value 16 + j in its high half (as GGUF's Q4_0 and Q4_1 do), so that both halves are
  runs of consecutive k. k and group are multiples of 32.
- `scales` float32 [n, k / group]; `zeros` float32 of that shape or None for 0, on the scale of q (so -8..7 for INT4),
  not necessarily whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.linear import linear

PACK = 32
_HALF = PACK // 2
Bits = Literal[4, 8]


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight [n, k] as the module describes it."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def bits(self) -> Bits:
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k) of the weight it stands for."""
        rows, columns = self.values.shape
        return rows, columns * 8 // self.bits

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]


def quantise(
    weight: torch.Tensor, bits: Bits, group: int | None = None, *, asymmetric: bool = False
) -> QuantisedWeight:
    """Round weight [n, k] to the nearest values of its groups; group None: one group for each output.

    INT8 is symmetric in -127..127. INT4 uses all of -8..7: the value largest in magnitude becomes -8, or with
    `asymmetric` the smallest becomes -8 and the largest 7.
    """
    rows, k = weight.shape
    group = k if group is None else group
    if k % group or (bits == 4 and group % PACK):
        raise ValueError(f"group {group} for k {k}: must divide it, and be a multiple of {PACK} for INT4")
    if asymmetric and bits == 8:
        raise ValueError("INT8 is symmetric")
    grouped = weight.float().view(rows, k // group, group)
    scales, zeros = _ranges(grouped, bits, asymmetric)
    divisors = torch.where(scales == 0, 1.0, scales)[..., None]
    scaled = grouped / divisors if zeros is None else grouped / divisors + zeros[..., None]
    lowest = -127 if bits == 8 else -8
    q = scaled.round().clamp(lowest, 127 if bits == 8 else 7).to(torch.int8).view(rows, k)
    return QuantisedWeight(q if bits == 8 else pack_int4(q), scales, zeros)


def _ranges(grouped: torch.Tensor, bits: Bits, asymmetric: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros [n, groups] of values [n, groups, group]."""
    if bits == 8:
        return grouped.abs().amax(-1) / 127, None
    if not asymmetric:
        furthest = grouped.abs().argmax(-1, keepdim=True)
        return grouped.gather(-1, furthest)[..., 0] / -8, None
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = (high - low) / 15
    # All values equal: the scale is the value itself and q is 1.
    scales = torch.where(scales == 0, low, scales)
    zeros = torch.where(high == low, 0.0, -8 - low / torch.where(scales == 0, 1.0, scales))
    return scales, zeros


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """int8 [n, k] in -8..7 to uint8 [n, k / 2]."""
    packs = (q + 8).to(torch.uint8).view(len(q), -1, 2, _HALF)
    return (packs[:, :, 0] | packs[:, :, 1] << 4).reshape(len(q), -1)


def unpack_int4(values: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k / 2] to int8 [n, k] in -8..7."""
    packs = values.view(len(values), -1, _HALF)
    halves = torch.stack((packs & 15, packs >> 4), dim=2).to(torch.int8) - 8
    return halves.reshape(len(values), -1)


def dequantise(weight: QuantisedWeight) -> torch.Tensor:
    """The float32 [n, k] that the quantised weight stands for."""
    rows, k = weight.shape
    q = weight.values if weight.bits == 8 else unpack_int4(weight.values)
    grouped = q.float().view(rows, k // weight.group, weight.group)
    if weight.zeros is not None:
        grouped = grouped - weight.zeros[..., None]
    return (grouped * weight.scales[..., None]).view(rows, k)


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, k] of any float dtype times the weight transposed; summed in float32 [T, n]. Rows never interact."""
    return linear(x.float(), dequantise(weight), bias)
