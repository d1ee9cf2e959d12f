"""The adapters' specification: against a loop over tokens, and rows never influence each other."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import Adapters, add_lora


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_meets_its_own_adapter(dtype: torch.dtype) -> None:
    adapters = Adapters(torch.randn(3, 8, 32).to(dtype), torch.randn(3, 20, 8).to(dtype), torch.tensor([1.0, 0.5, 2.0]))
    x, index = torch.randn(7, 32).to(dtype), torch.tensor([2, -1, 0, 2, 0, -1, 2])
    start = torch.randn(7, 20)
    out = start.clone()
    add_lora(out, x, adapters, index)
    for token, adapter in enumerate(index.tolist()):
        gain = torch.zeros(20)
        if adapter >= 0:
            low = (adapters.down[adapter].float() @ x[token].float()).to(dtype).float()
            gain = adapters.scaling[adapter] * (adapters.up[adapter].float() @ low)
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out[token], start[token] + gain, atol=tolerance, rtol=1e-2)
        alone = start[token : token + 1].clone()
        add_lora(alone, x[token : token + 1], adapters, index[token : token + 1])
        assert torch.equal(alone[0], out[token])
