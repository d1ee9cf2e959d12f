"""Inverse frequencies of the rotary embedding, with the scalings that long-context models use.

Some depend on how long a sequence may grow; they are fixed by the served context length, so that keys in the pool never
change their meaning. Computed in float64 and rounded once: they enter the model digest, which must not depend on a
machine's vector library.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernels.rotary import rotary_table
from services.worker.model.config import RopeConfig, RopeScaling

Scaled = Callable[[RopeConfig, RopeScaling, int], torch.Tensor]


def inverse_frequencies(rope: RopeConfig, served_context: int) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians a position turns each pair of elements."""
    if rope.scaling is None:
        return _plain(rope.theta, rope.rotary_dim).float()
    return _SCALINGS[rope.scaling.kind](rope, rope.scaling, served_context).float()


def rotary_tables(rope: RopeConfig, served_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position served, float32 [served_context, rotary_dim / 2], as the model applies them."""
    factor = rope.scaling.attention_factor if rope.scaling else 1.0
    return rotary_table(inverse_frequencies(rope, served_context), served_context, factor=factor)


def extended_positions(max_positions: int, rope: RopeConfig) -> int:
    """How far a model reaches: yarn and dynamic scaling stretch the length that a model states."""
    scaling = rope.scaling
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """The temperature of the attention (Peng et al., 2023), which here multiplies cosine and sine."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention(factor: float, original: int) -> float:
    """What multiplies cosine and sine (Ding et al., 2024), whichever divisors are in use."""
    return 1.0 if factor <= 1.0 or original < 2 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return theta**-exponents


def _linear(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    return _plain(rope.theta, rope.rotary_dim) / scaling.factor


def _factors(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    return _plain(rope.theta, rope.rotary_dim) / torch.tensor(scaling.frequency_divisors, dtype=torch.float64)


def _longrope(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    """The divisors for short sequences are right while none can grow beyond the original length."""
    long = served_context > scaling.original_max_positions
    divisors = scaling.frequency_divisors if long else scaling.short_divisors
    return _plain(rope.theta, rope.rotary_dim) / torch.tensor(divisors, dtype=torch.float64)


def _dynamic(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    """A larger theta, chosen so that the slowest pair turns over the served context as it did over the original."""
    stretch = max(served_context, scaling.original_max_positions) / scaling.original_max_positions
    growth = scaling.factor * stretch - (scaling.factor - 1)
    return _plain(rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim)


def _yarn(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    """Pairs that turn beta_fast times in the original length are kept, below beta_slow stretched, a ramp between."""

    def pair_with(turns: float) -> float:
        reach = math.log(scaling.original_max_positions / (turns * 2 * math.pi))
        return rope.rotary_dim * reach / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    plain = _plain(rope.theta, rope.rotary_dim)
    return plain * (1.0 - stretched) + plain / scaling.factor * stretched


def _llama3(rope: RopeConfig, scaling: RopeScaling, served_context: int) -> torch.Tensor:
    """Wavelengths above original / low_freq_factor are stretched, those below original / high_freq_factor kept."""
    plain = _plain(rope.theta, rope.rotary_dim)
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


_SCALINGS: dict[str, Scaled] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "factors": _factors,
}
