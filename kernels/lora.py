"""Low-rank adapters (Hu et al., 2021), several in one batch: the specification, in plain torch.

A token's output gains scaling * up (down x) of its adapter. What lies between the two products is rounded to x's dtype;
the products are float32 and row-invariant (kernels/linear.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import linear


@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear layer [n, k]: down [A, rank, k] and up [A, n, rank] of one dtype, scaling float32 [A].

    Adapters of lower rank are filled up with zeros.
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter of one projection [n, k]: down [rank, k] and up [n, rank] of one dtype."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    @property
    def alone(self) -> Adapters:
        """As the only adapter, number 0."""
        return Adapters(self.down[None], self.up[None], torch.tensor([self.scaling], dtype=torch.float32))


def add_lora(out: torch.Tensor, x: torch.Tensor, adapters: Adapters, index: torch.Tensor) -> None:
    """Add to out [T, n] in place what the adapters make of x [T, k].

    index: integers [T], each token's adapter, -1 for none; in any order.
    """
    for adapter in sorted(set(index.tolist()) - {-1}):
        tokens = torch.nonzero(index == adapter)[:, 0]
        low = linear(x[tokens], adapters.down[adapter]).to(x.dtype)
        gain = linear(low, adapters.up[adapter]) * adapters.scaling[adapter]
        out[tokens] = (out[tokens].float() + gain).to(out.dtype)
