"""Inverse frequencies of the rotary embedding, with the scalings that long-context models use.

Computed in float64 and rounded once: they enter the model digest, which must not depend on a machine's vector library.
"""

from __future__ import annotations

import math

import torch

from services.worker.model.config import RopeConfig, RopeScaling


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians a position turns each pair of elements."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return _scaled(rope.theta**-exponents, rope.scaling).float()


def _scaled(plain: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.frequency_divisors, dtype=torch.float64)
    return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Wavelengths above original / low_freq_factor are stretched, those below original / high_freq_factor kept."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor
