"""The gated activations' kernel against their specification."""

from __future__ import annotations

import pytest
import torch

from kernels import activation as reference
from kernels.activation import Activation
from kernels.triton.activation import gated


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 1025), (0, 8)])
def test_gated(shape: tuple[int, int], dtype: torch.dtype, activation: Activation) -> None:
    gate_up = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    expected = reference.gated(gate_up, activation).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gated(gate_up, activation, dtype=dtype), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_huge_values_neither_overflow_nor_turn_into_nan(activation: Activation) -> None:
    gate_up = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4, 2.0, 2.0, 2.0, 2.0, 2.0]])
    found = gated(gate_up, activation, dtype=torch.float32)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0, 200.0, 6e4]]))
