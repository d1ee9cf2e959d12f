"""RMS normalisation and the rotary embedding with its KV write, against their references."""

from __future__ import annotations

import pytest
import torch

from kernels import rms_norm as rms_norm_reference
from kernels import rotary
from kernels.batch import BLOCK_TOKENS
from kernels.cpu import library

from .batches import make_batch

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 576), (40, 2048)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape) * 5, torch.randn(shape[1])
    out = torch.empty(shape, dtype=dtype)
    library.rms_norm(x, weight, 1e-5, out, num_threads=2)
    expected = rms_norm_reference.rms_norm(x, weight, eps=1e-5, dtype=dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 3, 64), (1, 2, 16), (2, 1, 80)])
@pytest.mark.parametrize("sequences", [[(1, 1)], [(1, 17), (16, 16), (3, 49), (21, 40)]])
def test_rotary_write(heads: tuple[int, int, int], sequences: list[tuple[int, int]], dtype: torch.dtype) -> None:
    kv_heads, group, head_dim = heads
    batch = make_batch(sequences, 20)
    qkv = torch.randn(batch.num_tokens, (group + 2) * kv_heads * head_dim)
    cos, sin = rotary.rotary_table(10000.0 ** -torch.arange(0, 1, 2 / head_dim), 64)
    pools = [torch.zeros(20, kv_heads, 2, 2, BLOCK_TOKENS, head_dim, dtype=dtype) for _ in range(2)]
    arguments = {"heads": kv_heads * group, "cos": cos, "sin": sin, "layer": 1}
    expected = rotary.rotary_write(qkv, batch, pool=pools[0], **arguments)
    found = library.rotary_write(qkv, batch, pool=pools[1], num_threads=2, **arguments)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pools[1], pools[0], atol=tolerance, rtol=tolerance)
    assert not pools[1][:, :, 0].any()
