"""RMS normalisation (Zhang and Sennrich, 2019), computed in float32: the specification, in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x float32 [..., width], weight float32 [width]; returns x's shape in `dtype`."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)
