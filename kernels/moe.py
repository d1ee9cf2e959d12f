"""Mixture of experts (Shazeer et al., 2017): routing, the experts' gated MLPs, and their sum; the specification.

A token's result depends on that token alone: its experts are ranked (larger logit first, of equal ones the lower
index), the products are row-invariant (kernels/linear.py), and the sum runs over its experts in rank order.
"""

from __future__ import annotations

import torch

from kernels.activation import Activation, gated
from kernels.linear import linear


def route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for each row of logits [T, E].

    Returns experts int64 [T, k] in rank order and their weights float32 [T, k]: shares of the softmax over all experts,
    made to sum to one over the k where `renormalise`.
    """
    logits = logits.float()
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = torch.softmax(logits, dim=-1).gather(1, experts)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def mixture(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    k: int,
    renormalise: bool,
    activation: Activation = "silu",
    first: int = 0,
) -> torch.Tensor:
    """x [T, H], router logits [T, E], gate_up [E, 2 I, H] (gate first), down [E, H, I]; float32 [T, H].

    x and both weights share a dtype, to which what enters `down` is rounded; the products are float32. gate_up and down
    may be those of some experts only, from `first` on: the others contribute nothing.
    """
    experts, weights = route(logits, k, renormalise)
    outputs = x.new_zeros((len(x), k, down.shape[1]), dtype=torch.float32)
    for expert in sorted(set(experts.flatten().tolist()) & set(range(first, first + len(down)))):
        tokens, ranks = torch.nonzero(experts == expert, as_tuple=True)
        hidden = gated(linear(x[tokens], gate_up[expert - first]), activation).to(x.dtype)
        outputs[tokens, ranks] = linear(hidden, down[expert - first])
    total = outputs[:, 0] * weights[:, :1]
    for rank in range(1, k):
        total += outputs[:, rank] * weights[:, rank : rank + 1]
    return total
