"""The gated activations of the MLPs, computed in float32: the specification, in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu_tanh"]


def gated_multiply(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, float32 of any common shape."""
    gate, up = gate.float(), up.float()
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [T, 2 I], the gate's I columns first; returns float32 [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated_multiply(gate, up, activation)
