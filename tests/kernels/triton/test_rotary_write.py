"""The fused rotary embedding and cache write against its reference: all kinds of heads, pools and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import rotary as reference
from kernels.batch import BLOCK_TOKENS
from kernels.kv_quantisation import dequantise, quantise
from kernels.rotary import rotary_table
from kernels.triton.device_batch import BatchShape, DeviceBatch, padded
from kernels.triton.rotary_write import rotary_write
from tests.kernels.batches import make_batch

from .device import DEVICE

NUM_BLOCKS = 12
SEQUENCES = [(1, 17), (1, 16), (5, 33), (3, 3)]
BATCH = make_batch(SEQUENCES, NUM_BLOCKS)
# heads, kv_heads, head_dim, rotary_dim
SHAPES = [(3, 1, 64, 64), (4, 2, 48, 32), (9, 3, 80, 80), (2, 2, 96, 20), (8, 1, 256, 128), (12, 12, 16, 2)]


def tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_table(torch.rand(rotary_dim // 2), 64)


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def run(qkv: torch.Tensor, pool: torch.Tensor, batch: DeviceBatch | None = None, **options: Any) -> torch.Tensor:
    """The kernel on the device; `pool` and `kv_scales` are changed as they are by the reference."""
    moved = on_device({"pool": pool, **options})
    found = rotary_write(qkv.to(DEVICE), batch or DeviceBatch.from_batch(BATCH, DEVICE), layer=1, **moved)
    pool.copy_(moved["pool"])
    if options.get("kv_scales") is not None:
        options["kv_scales"].copy_(moved["kv_scales"])
    return found.cpu()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary_dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
def test_agrees(heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, norm: bool) -> None:
    qkv = torch.randn(BATCH.num_tokens, (heads + 2 * kv_heads) * head_dim)
    cos, sin = tables(rotary_dim)
    norms = {"q_norm": torch.rand(head_dim) + 0.5, "k_norm": torch.rand(head_dim) + 0.5, "eps": 1e-5} if norm else {}
    options: dict[str, Any] = {"heads": heads, "cos": cos, "sin": sin, **norms}
    expected_pool = torch.full((NUM_BLOCKS, kv_heads, 2, 2, BLOCK_TOKENS, head_dim), 7.0, dtype=dtype)
    pool = expected_pool.clone()
    expected = reference.rotary_write(qkv, BATCH, pool=expected_pool, layer=1, **options)
    found = run(qkv, pool, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, atol=tolerance, rtol=tolerance)
    assert torch.equal(pool == 7.0, expected_pool == 7.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_pool_holds_what_quantise_makes_of_the_rows(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 4, 2, 64
    qkv = (
        torch.randn(BATCH.num_tokens, (heads + 2 * kv_heads) * head_dim)
        * torch.logspace(-3, 3, BATCH.num_tokens)[:, None]
    )
    qkv[2] = 0.0
    cos, sin = tables(head_dim)
    plain = torch.zeros((NUM_BLOCKS, kv_heads, 2, 2, BLOCK_TOKENS, head_dim))
    query = reference.rotary_write(qkv, BATCH, heads=heads, cos=cos, sin=sin, pool=plain, layer=1)
    expected, expected_scales = quantise(plain, dtype)
    pool = torch.zeros(plain.shape).to(dtype)
    scales = torch.ones(plain.shape[:-1])
    found = run(qkv, pool, heads=heads, cos=cos, sin=sin, kv_scales=scales, query_dtype=torch.float32)
    torch.testing.assert_close(found, query, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0.0)
    # The rows differ by roundings, so here and there one is on the other side of a tie.
    wrong = pool.float() != expected.float()
    assert wrong.float().mean() < 0.01
    worst = (dequantise(pool, scales) - plain).abs() / plain.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    assert worst.max() < (0.04 if dtype == torch.float8_e4m3fn else 0.0041)


def test_rows_may_lie_apart_and_be_bfloat16() -> None:
    wide = torch.randn(BATCH.num_tokens, 5 * 64 + 32).bfloat16()
    cos, sin = tables(64)
    pools = [torch.zeros((NUM_BLOCKS, 1, 2, 2, BLOCK_TOKENS, 64), dtype=torch.bfloat16) for _ in range(2)]
    expected = reference.rotary_write(wide[:, :320].float(), BATCH, heads=3, cos=cos, sin=sin, pool=pools[0], layer=1)
    found = run(wide.to(DEVICE)[:, :320], pools[1], heads=3, cos=cos, sin=sin)
    torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(pools[1], pools[0], atol=1.6e-2, rtol=1.6e-2)


def test_padding_is_written_nowhere() -> None:
    full = padded(BATCH, BatchShape(BATCH.num_tokens + 5, len(SEQUENCES) + 2, 4, 0))
    qkv = torch.randn(full.num_tokens, 3 * 32)
    cos, sin = tables(32)
    pools = [torch.full((NUM_BLOCKS, 1, 2, 2, BLOCK_TOKENS, 32), 7.0) for _ in range(2)]
    whole = run(qkv, pools[0], DeviceBatch.from_batch(full, DEVICE), heads=1, cos=cos, sin=sin)
    alone = run(qkv[: BATCH.num_tokens], pools[1], heads=1, cos=cos, sin=sin)
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(whole[: BATCH.num_tokens], alone)


def test_what_does_not_belong_together_is_refused() -> None:
    pool = torch.zeros((NUM_BLOCKS, 1, 2, 2, BLOCK_TOKENS, 32))
    cos, sin = tables(32)
    qkv = torch.randn(BATCH.num_tokens, 96)
    with pytest.raises(ValueError, match="for 2 heads"):
        run(qkv, pool, heads=2, cos=cos, sin=sin)
    with pytest.raises(ValueError, match="q_norm"):
        run(qkv, pool, heads=1, cos=cos, sin=sin, q_norm=torch.ones(32))
    with pytest.raises(ValueError, match="scales"):
        run(qkv, pool.to(torch.int8), heads=1, cos=cos, sin=sin)
    with pytest.raises(ValueError, match="dtype"):
        run(qkv, pool.to(torch.int8), heads=1, cos=cos, sin=sin, kv_scales=torch.ones(pool.shape[:-1]))
