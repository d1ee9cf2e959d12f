"""Linear layers of a device: full precision, FP8, INT8 and INT4 weights behind one call.

Without exact mode products of full precision are the vendor library's, which picks its algorithm by the number of
rows; in exact mode they are the Triton kernel's with one fixed tile, so that a row does not depend on those beside it.
INT8 and INT4 (weights alone) are Triton in both. FP8 (e4m3, weights and activations, one scale for each output and each
row) is the vendor library's alone and refused in exact mode.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.quantised_linear import QuantisedWeight, quantise
from kernels.triton.linear import linear
from kernels.triton.quantised_linear import quantised_linear
from services.worker.model.layout import DeviceWeightDtype

# Values of one scale: of INT4 a length that costs little memory and little accuracy.
INT4_GROUP = 128
_LARGEST_E4M3 = 448.0


class LinearLayer(Protocol):
    """x [T, k] to [T, n], both in the compute dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, plus the bias where there is one."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it keeps on the device."""


class DenseLayer:
    """Weights in the compute dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, exact: bool) -> None:
        self._weight = weight
        self._bias = bias if bias is None or exact else bias.to(weight.dtype)
        self._exact = exact
        self.tensors = (weight,) if self._bias is None else (weight, self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearLayer."""
        if self._exact:
            return linear(x, self._weight, self._bias, exact=True, dtype=x.dtype)
        return F.linear(x, self._weight, self._bias)


class IntegerLayer:
    """INT8 or INT4 weights."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None, *, exact: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._exact = exact
        given = (weight.values, weight.scales, weight.zeros, bias)
        self.tensors = tuple(tensor for tensor in given if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearLayer."""
        return quantised_linear(x, self._weight, self._bias, exact=self._exact, dtype=x.dtype)


class Float8Layer:
    """Weights and activations of e4m3, sums in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, scales = to_float8(weight)
        self._scales = scales.t().contiguous()
        self._bias = bias
        self.tensors = (self._weight, self._scales) if bias is None else (self._weight, self._scales, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearLayer."""
        rows, scales = to_float8(x)
        if x.device.type == "cuda":
            product: torch.Tensor = torch._scaled_mm(
                rows, self._weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
            )
        else:
            product = (F.linear(rows.float(), self._weight.float()) * scales * self._scales).to(torch.bfloat16)
        return product if self._bias is None else (product + self._bias).to(torch.bfloat16)


def to_float8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, k] as e4m3 and float32 scales [T, 1]; a row of zeros has a scale that is no zero."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST_E4M3
    return (rows / scales).clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn), scales


def make_layer(
    weight: torch.Tensor, bias: torch.Tensor | None, weight_dtype: DeviceWeightDtype, *, exact: bool
) -> LinearLayer:
    """A layer with `weight` [n, k], on its device, rounded to weight_dtype.

    INT4 takes groups of 128 where they divide k, else of 32, and INT8 for a k that no group divides. Raises ValueError
    for FP8 in exact mode.
    """
    if weight_dtype == "dtype":
        return DenseLayer(weight, bias, exact=exact)
    if weight_dtype == "float8":
        if exact:
            raise ValueError("FP8 products are the vendor library's, which depend on the number of rows: not exact")
        return Float8Layer(weight, bias)
    k = weight.shape[1]
    group = next((size for size in (INT4_GROUP, 32) if k % size == 0), None)
    rounded = quantise(weight, 4, group) if weight_dtype == "int4" and group else quantise(weight, 8)
    return IntegerLayer(rounded, bias, exact=exact)
