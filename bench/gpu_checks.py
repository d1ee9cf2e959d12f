"""Every kernel against its reference on the device at hand: small shapes with odd edges, a tolerance for each.

On a GPU these are the compiled kernels; on CPU tensors the same calls run in Triton's interpreter, which shows that the
checks themselves work.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kernels import activation, block_copy, kv_quantisation, moe, quantised_linear, rms_norm, rotary, sampling
from kernels import paged_attention as attention
from kernels.batch import BLOCK_TOKENS, PagedBatch
from kernels.linear import linear
from kernels.triton import activation as triton_activation
from kernels.triton import block_copy as triton_block_copy
from kernels.triton import moe as triton_moe
from kernels.triton import rms_norm as triton_rms_norm
from kernels.triton import sampling as triton_sampling
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.linear import linear as triton_linear
from kernels.triton.paged_attention import paged_attention as triton_attention
from kernels.triton.quantised_linear import quantised_linear as triton_quantised
from kernels.triton.rotary_write import rotary_write as triton_rotary_write

BF16 = torch.bfloat16
# Relative to the largest value of the reference.
TOLERANCE = 2e-2
Check = Callable[[torch.device], float]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Register a check: the largest error, relative to the largest value expected."""

    def register(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return register


def sequences(shapes: list[tuple[int, int]], num_blocks: int) -> PagedBatch:
    """A batch of (query tokens, context) over blocks in random order, logits of every last token."""
    random = np.random.default_rng(7)
    slots = random.permutation(num_blocks).astype(np.int32)
    counts = [-(-context // BLOCK_TOKENS) for _, context in shapes]
    tables = np.full((len(shapes), max(counts)), -1, dtype=np.int32)
    for row, (count, first) in enumerate(zip(counts, np.cumsum([0, *counts]), strict=False)):
        tables[row, :count] = slots[first : first + count]
    starts = np.cumsum([0, *(tokens for tokens, _ in shapes)]).astype(np.int32)
    return PagedBatch(
        token_ids=random.integers(0, 100, int(starts[-1])).astype(np.int32),
        positions=np.concatenate([np.arange(c - t, c) for t, c in shapes]).astype(np.int32),
        query_starts=starts,
        context_lens=np.array([context for _, context in shapes], dtype=np.int32),
        block_tables=tables,
        logit_rows=starts[1:] - 1,
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value; infinite where something is not a number."""
    found, expected = found.float().cpu(), expected.float().cpu()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def _attention(
    device: torch.device, shapes: list[tuple[int, int]], *, exact: bool = False, window: int = 0, softcap: float = 0.0
) -> float:
    batch = sequences(shapes, 64)
    pool = torch.randn(64, 2, 2, 2, BLOCK_TOKENS, 64).to(BF16)
    query = torch.randn(batch.num_tokens, 8, 64).to(BF16)
    expected = attention.paged_attention(query, pool, 1, batch, scale=0.125, window=window, softcap=softcap)
    found = triton_attention(
        query.to(device),
        pool.to(device),
        1,
        DeviceBatch.from_batch(batch, device),
        scale=0.125,
        exact=exact,
        window=window,
        softcap=softcap,
    )
    return difference(found, expected)


DECODE = [(1, 37), (1, 16), (1, 1), (1, 130)]
MIXED = [(1, 65), (29, 29), (5, 54), (1, 2)]


@check("attention decode")
def _decode(device: torch.device) -> float:
    return _attention(device, DECODE)


@check("attention mixed")
def _mixed(device: torch.device) -> float:
    return _attention(device, MIXED)


@check("attention exact")
def _exact(device: torch.device) -> float:
    return _attention(device, MIXED, exact=True)


@check("attention window, soft cap")
def _window(device: torch.device) -> float:
    return _attention(device, MIXED, window=24, softcap=20.0)


@check("attention fp8 kv")
def _fp8(device: torch.device) -> float:
    batch = sequences(MIXED, 64)
    pool, scales = kv_quantisation.quantise(torch.randn(64, 2, 1, 2, BLOCK_TOKENS, 64), torch.float8_e4m3fn)
    query = torch.randn(batch.num_tokens, 8, 64).to(BF16)
    expected = kv_quantisation.quantised_attention(query, pool, scales, 0, batch, scale=0.125)
    found = triton_attention(
        query.to(device),
        pool.to(device),
        0,
        DeviceBatch.from_batch(batch, device),
        scale=0.125,
        kv_scales=scales.to(device),
    )
    return difference(found, expected)


@check("rotary and write")
def _rotary(device: torch.device) -> float:
    batch = sequences(MIXED, 64)
    qkv = torch.randn(batch.num_tokens, 12 * 64).to(BF16)
    cos, sin = rotary.rotary_table(torch.rand(32), 256)
    pool = torch.zeros(64, 2, 1, 2, BLOCK_TOKENS, 64, dtype=BF16)
    moved = pool.to(device, copy=True)
    expected = rotary.rotary_write(qkv.float(), batch, heads=8, cos=cos, sin=sin, pool=pool, layer=0)
    found = triton_rotary_write(
        qkv.to(device),
        DeviceBatch.from_batch(batch, device),
        heads=8,
        cos=cos.to(device),
        sin=sin.to(device),
        pool=moved,
        layer=0,
    )
    return max(difference(found, expected), difference(moved, pool))


@check("rms norm with residual")
def _norm(device: torch.device) -> float:
    x, residual, weight = torch.randn(5, 192).to(BF16), torch.randn(5, 192), torch.rand(192)
    total = residual + x.float()
    expected = rms_norm.rms_norm(total, weight, eps=1e-5, dtype=BF16)
    there = residual.to(device, copy=True)
    found = triton_rms_norm.add_rms_norm(x.to(device), there, weight.to(device), eps=1e-5, dtype=BF16)
    return max(difference(found, expected), difference(there, total))


@check("gated activation")
def _gated(device: torch.device) -> float:
    x = torch.randn(5, 2 * 96).to(BF16)
    expected = activation.gated(x, "silu")
    return difference(triton_activation.gated(x.to(device), "silu", dtype=BF16), expected)


@check("block copy")
def _copy(device: torch.device) -> float:
    pool = torch.randn(9, 2, 3, 2, BLOCK_TOKENS, 16)
    slots = torch.tensor([7, 2, 5], dtype=torch.int32)
    staging = torch.zeros(3, 2 * block_copy.head_bytes(pool), dtype=torch.uint8)
    block_copy.gather_blocks(pool, slots, staging)
    moved = torch.zeros(staging.shape, dtype=torch.uint8, device=device)
    triton_block_copy.gather_blocks(pool.to(device), slots.to(device), moved)
    back = torch.zeros(pool.shape, device=device)
    triton_block_copy.scatter_blocks(back, slots.to(device), moved)
    wrong = not torch.equal(moved.cpu(), staging) or not torch.equal(back.cpu()[[7, 2, 5]], pool[[7, 2, 5]])
    return float("inf") if wrong else 0.0


def _linear(device: torch.device, rows: int, *, exact: bool) -> float:
    x, weight = torch.randn(rows, 256).to(BF16), torch.randn(160, 256).to(BF16)
    return difference(triton_linear(x.to(device), weight.to(device), exact=exact), linear(x, weight))


@check("linear decode")
def _linear_decode(device: torch.device) -> float:
    return _linear(device, 3, exact=False)


@check("linear exact")
def _linear_exact(device: torch.device) -> float:
    return _linear(device, 70, exact=True)


def _rounded(device: torch.device, bits: quantised_linear.Bits, rows: int) -> float:
    x, weight = torch.randn(rows, 256).to(BF16), torch.randn(160, 256)
    packed = quantised_linear.quantise(weight, bits, 128 if bits == 4 else None)
    expected = quantised_linear.quantised_linear(x, packed)
    there = quantised_linear.QuantisedWeight(packed.values.to(device), packed.scales.to(device), None)
    return difference(triton_quantised(x.to(device), there, exact=False), expected)


@check("linear int8")
def _int8(device: torch.device) -> float:
    return max(_rounded(device, 8, rows) for rows in (3, 40))


@check("linear int4")
def _int4(device: torch.device) -> float:
    return max(_rounded(device, 4, rows) for rows in (3, 40))


@check("mixture of experts")
def _mixture(device: torch.device) -> float:
    x, logits = torch.randn(9, 64).to(BF16), torch.randn(9, 5)
    gate_up, down = torch.randn(5, 96, 64).to(BF16) / 8, torch.randn(5, 64, 48).to(BF16) / 8
    expected = moe.mixture(x, logits, gate_up, down, k=2, renormalise=True)
    given = [tensor.to(device) for tensor in (x, logits, gate_up, down)]
    return difference(triton_moe.mixture(*given, k=2, renormalise=True, exact=False), expected)


def sampling_rows(count: int, device: torch.device) -> sampling.SamplingRows:
    """Greedy, top-k, top-p and min-p rows in turn."""
    which = torch.arange(count)
    return sampling.SamplingRows(
        temperature=torch.where(which % 4 == 0, 0.0, 0.8).double().to(device),
        top_k=torch.where(which % 4 == 1, 20, 0).int().to(device),
        top_p=torch.where(which % 4 == 2, 0.9, 1.0).double().to(device),
        min_p=torch.where(which % 4 == 3, 0.05, 0.0).double().to(device),
        share=(torch.arange(count).double() * 0.37 % 1.0).to(device),
    )


@check("sampling")
def _sampling(device: torch.device) -> float:
    logits = torch.randn(8, 500) * 3
    expected = sampling.draw_tokens(logits, sampling_rows(8, torch.device("cpu")))
    found = triton_sampling.draw_tokens(logits.to(device), sampling_rows(8, device))
    return 0.0 if torch.equal(found.cpu().long(), expected.long()) else float("inf")
