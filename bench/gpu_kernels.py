"""Times of the kernels at the shapes of an 8B Llama, each against the device's own limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_checks import sampling_rows, sequences
from bench.gpu_measure import Limits, Row, Timer, bandwidth_row, compute_row
from kernels.batch import BLOCK_TOKENS
from kernels.quantised_linear import quantise
from kernels.rotary import rotary_table
from kernels.triton.activation import gated
from kernels.triton.attention_configs import AttentionConfig
from kernels.triton.block_copy import gather_blocks, scatter_blocks
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.linear import linear
from kernels.triton.moe import mixture
from kernels.triton.paged_attention import paged_attention
from kernels.triton.quantised_linear import quantised_linear
from kernels.triton.rms_norm import add_rms_norm
from kernels.triton.rotary_write import rotary_write
from kernels.triton.sampling import draw_tokens

BF16 = torch.bfloat16
DECODE_TARGET, PREFILL_TARGET = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model and a device decides the sizes."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    decode_cases: tuple[tuple[int, int], ...] = ((1, 32768), (8, 8192), (16, 4096), (64, 4096))
    prefill_cases: tuple[tuple[int, int], ...] = ((1, 8192), (4, 2048))
    rows: tuple[int, ...] = (1, 16, 64, 2048)


TINY = Shape(4, 2, 32, 2, 128, 128, 256, ((2, 40),), ((1, 33),), (3,))
Case = tuple[str, Callable[[], Row]]


def attention_cases(
    timer: Timer, limits: Limits, shape: Shape, config: AttentionConfig | None = None
) -> Iterator[Case]:
    """Decode against copy bandwidth, prefill against torch's flash attention."""
    most = max(seqs * -(-context // BLOCK_TOKENS) for seqs, context in (*shape.decode_cases, *shape.prefill_cases))
    # With all layers in a block the reads of one are as far apart as in a worker; fewer where memory is short.
    layer_bytes = most * 2 * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * 2
    layers = max(1, min(shape.layers, int(0.7 * _free_bytes(timer.device)) // layer_bytes))
    pool = torch.empty(most, shape.kv_heads, layers, 2, BLOCK_TOKENS, shape.head_dim, dtype=BF16, device=timer.device)
    pool.normal_()
    for seqs, context in shape.decode_cases:
        case = partial(_decode, timer, limits, shape, pool, seqs, context, config)
        yield f"attention decode {seqs} x {context}", case
    for seqs, tokens in shape.prefill_cases:
        yield f"attention prefill {seqs} x {tokens}", partial(_prefill, timer, shape, pool, seqs, tokens, config)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**28


def _decode(
    timer: Timer,
    limits: Limits,
    shape: Shape,
    pool: torch.Tensor,
    seqs: int,
    context: int,
    config: AttentionConfig | None,
) -> Row:
    batch = DeviceBatch.from_batch(sequences([(1, context)] * seqs, len(pool)), timer.device)
    query = torch.randn(seqs, shape.heads, shape.head_dim, dtype=BF16, device=timer.device)
    layer = pool.shape[2] - 1
    ms = timer.milliseconds(lambda: paged_attention(query, pool, layer, batch, scale=0.09, config=config))
    num_bytes = seqs * context * 2 * shape.kv_heads * shape.head_dim * 2
    return bandwidth_row(f"attention decode {seqs} x {context}", ms, num_bytes, limits, DECODE_TARGET)


def _prefill(
    timer: Timer, shape: Shape, pool: torch.Tensor, seqs: int, tokens: int, config: AttentionConfig | None
) -> Row:
    """As a whole prompt each; torch has keys and values in one piece, repeated for the heads that share them."""
    batch = DeviceBatch.from_batch(sequences([(tokens, tokens)] * seqs, len(pool)), timer.device)
    query = torch.randn(seqs * tokens, shape.heads, shape.head_dim, dtype=BF16, device=timer.device)
    ms = timer.milliseconds(lambda: paged_attention(query, pool, 0, batch, scale=0.09, config=config), cold=False)
    q, k, v = (
        torch.randn(seqs, shape.heads, tokens, shape.head_dim, dtype=BF16, device=timer.device) for _ in range(3)
    )
    backend = SDPBackend.FLASH_ATTENTION if timer.device.type == "cuda" else SDPBackend.MATH
    with sdpa_kernel(backend):
        flash_ms = timer.milliseconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.09), cold=False
        )
    flop = 2 * seqs * tokens * tokens * shape.heads * shape.head_dim
    figure = f"{flop / ms / 1e9:.0f} TFLOP/s"
    return Row(f"attention prefill {seqs} x {tokens}", ms, figure, "torch flash", flash_ms / ms, PREFILL_TARGET)


def layer_cases(timer: Timer, limits: Limits, shape: Shape) -> Iterator[Case]:
    """What else a layer is made of."""
    for rows in shape.rows:
        yield f"rms norm {rows}", partial(_norm, timer, limits, shape, rows)
        yield f"gated activation {rows}", partial(_gated, timer, limits, shape, rows)
        yield f"rotary and write {rows}", partial(_rotary, timer, limits, shape, rows)
        for kind in ("library", "triton", "exact", "int8", "int4"):
            yield f"linear {kind} {rows}", partial(_linear, timer, limits, shape, rows, kind)
    yield "block gather", partial(_block_copy, timer, limits, shape, gather=True)
    yield "block scatter", partial(_block_copy, timer, limits, shape, gather=False)
    yield "mixture of experts", partial(_mixture, timer, limits, shape)
    yield "sampling", partial(_sampling, timer, limits, shape)


def _norm(timer: Timer, limits: Limits, shape: Shape, rows: int) -> Row:
    x = torch.randn(rows, shape.hidden, dtype=BF16, device=timer.device)
    residual = torch.randn(rows, shape.hidden, device=timer.device)
    weight = torch.ones(shape.hidden, device=timer.device)
    ms = timer.milliseconds(lambda: add_rms_norm(x, residual, weight, eps=1e-5, dtype=BF16))
    return bandwidth_row(f"rms norm {rows}", ms, rows * shape.hidden * (2 + 4 + 4 + 2), limits)


def _gated(timer: Timer, limits: Limits, shape: Shape, rows: int) -> Row:
    x = torch.randn(rows, 2 * shape.intermediate, dtype=BF16, device=timer.device)
    ms = timer.milliseconds(lambda: gated(x, "silu", dtype=BF16))
    return bandwidth_row(f"gated activation {rows}", ms, rows * shape.intermediate * 6, limits)


def _rotary(timer: Timer, limits: Limits, shape: Shape, rows: int) -> Row:
    num_blocks = -(-rows // BLOCK_TOKENS)
    batch = DeviceBatch.from_batch(sequences([(rows, rows)], num_blocks), timer.device)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(rows, width, dtype=BF16, device=timer.device)
    cos, sin = (table.to(timer.device) for table in rotary_table(torch.rand(shape.head_dim // 2), rows))
    pool = torch.zeros(num_blocks, shape.kv_heads, 2, 2, BLOCK_TOKENS, shape.head_dim, dtype=BF16, device=timer.device)
    ms = timer.milliseconds(lambda: rotary_write(qkv, batch, heads=shape.heads, cos=cos, sin=sin, pool=pool, layer=0))
    return bandwidth_row(f"rotary and write {rows}", ms, rows * width * 4, limits)


def _linear(timer: Timer, limits: Limits, shape: Shape, rows: int, kind: str) -> Row:
    """The product of gate and up: few rows are bound by the weights, many by arithmetic."""
    n, k = 2 * shape.intermediate, shape.hidden
    x = torch.randn(rows, k, dtype=BF16, device=timer.device)
    weight = torch.randn(n, k, dtype=BF16, device=timer.device)
    call: Callable[[], torch.Tensor]
    if kind in ("int8", "int4"):
        packed = quantise(weight, 8) if kind == "int8" else quantise(weight, 4, min(128, k))
        num_bytes, call = packed.values.nbytes, lambda: quantised_linear(x, packed, exact=False, dtype=BF16)
    elif kind == "library":
        num_bytes, call = weight.nbytes, lambda: F.linear(x, weight)
    else:
        num_bytes, call = weight.nbytes, lambda: linear(x, weight, exact=kind == "exact", dtype=BF16)
    ms = timer.milliseconds(call)
    name = f"linear {kind} {rows}"
    if rows > 256:
        return compute_row(name, ms, 2.0 * rows * n * k, limits)
    return bandwidth_row(name, ms, num_bytes + rows * (n + k) * 2, limits)


def _block_copy(timer: Timer, limits: Limits, shape: Shape, *, gather: bool) -> Row:
    count = 64 if timer.device.type == "cuda" else 2
    pool = torch.zeros(
        2 * count, shape.kv_heads, shape.layers, 2, BLOCK_TOKENS, shape.head_dim, dtype=BF16, device=timer.device
    )
    staging = torch.zeros(count, pool[0].nbytes, dtype=torch.uint8, device=timer.device)
    slots = torch.randperm(2 * count)[:count].int().to(timer.device)
    copy = gather_blocks if gather else scatter_blocks
    ms = timer.milliseconds(lambda: copy(pool, slots, staging))
    return bandwidth_row("block gather" if gather else "block scatter", ms, 2 * staging.nbytes, limits)


def _mixture(timer: Timer, limits: Limits, shape: Shape) -> Row:
    """Eight experts of which two serve each of 16 tokens: about all are read."""
    experts, tokens = 8, 16
    x = torch.randn(tokens, shape.hidden, dtype=BF16, device=timer.device)
    logits = torch.randn(tokens, experts, device=timer.device)
    gate_up = torch.randn(experts, 2 * shape.intermediate, shape.hidden, dtype=BF16, device=timer.device)
    down = torch.randn(experts, shape.hidden, shape.intermediate, dtype=BF16, device=timer.device)
    used = len(set(logits.topk(2).indices.flatten().tolist()))
    call = partial(mixture, x, logits, gate_up, down, k=2, renormalise=True, exact=False)
    ms = timer.milliseconds(call)
    return bandwidth_row("mixture of experts", ms, used * (gate_up[0].nbytes + down[0].nbytes), limits)


def _sampling(timer: Timer, limits: Limits, shape: Shape) -> Row:
    rows = 32 if timer.device.type == "cuda" else 4
    logits = torch.randn(rows, shape.vocab, device=timer.device)
    given = sampling_rows(rows, timer.device)
    ms = timer.milliseconds(lambda: draw_tokens(logits, given), captured=False)
    return bandwidth_row("sampling", ms, logits.nbytes, limits)
