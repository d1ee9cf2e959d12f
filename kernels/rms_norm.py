"""RMS normalisation (Zhang and Sennrich, 2019), computed in float32: the specification, in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x float32 [..., width], weight float32 [width]; returns x's shape in `dtype`."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    post_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output x [T, width] to the residual stream [T, width] and normalise for the next sublayer.

    post_weight: x is normalised with it first (Gemma's norm after a sublayer). The sum is rounded to the residual's
    dtype before it is normalised. Returns (normed in `dtype`, new residual).
    """
    addend = x.float()
    if post_weight is not None:
        addend = rms_norm(addend, post_weight, eps=eps, dtype=torch.float32)
    total = (residual.float() + addend).to(residual.dtype)
    return rms_norm(total.float(), weight, eps=eps, dtype=dtype), total
