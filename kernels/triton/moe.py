"""Mixture of experts: routing, the experts' gated MLPs over rows sorted by expert, and the weighted sum.

Six launches and no word from the host; buffers for T tokens, k experts each: T * k rows of the activation and of the
output (float32). A token's sum runs over its experts in rank order, as kernels/moe.py specifies. **Exact**: one shape
of tile whatever the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.triton.grouped_linear import GroupedProduct, grouped_linear, shipped
from kernels.triton.grouping import group_rows
from kernels.triton.linear_configs import Tile
from kernels.triton.registry import KernelConfig, pointer

_SUM_BLOCK = 1024
# Rows for each expert, on average, up to which tiles serve; beyond the last: its tiles too. (gate_up, down)
TILES: dict[int, tuple[Tile, Tile]] = {
    16: (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)),
    64: (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    128: (Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
}
EXACT = (Tile(32, 32, 128, 4, 3), Tile(32, 64, 128, 4, 3))


@triton.jit
def route_kernel(
    logits_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_experts: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    inside = expert < num_experts
    logits = tl.load(logits_ptr + token * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0)
    # Integers in the order of the numbers, the two zeros being one; the least stands for "taken".
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    keys = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    chosen, weights = tl.zeros((RANKS,), tl.int32), tl.zeros((RANKS,), tl.float32)
    for place in tl.static_range(K):
        best = tl.minimum(tl.argmax(keys, 0, tie_break_left=True), num_experts - 1)
        chosen = tl.where(rank == place, best, chosen)
        weights = tl.where(rank == place, tl.sum(tl.where(expert == best, shares, 0.0), 0), weights)
        keys = tl.where(expert == best, -2147483648, keys)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    tl.store(experts_ptr + token * K + rank, chosen, mask=rank < K)
    tl.store(weights_ptr + token * K + rank, weights, mask=rank < K)


@triton.jit
def combine_kernel(
    outputs_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(K):
        weight = tl.load(weights_ptr + token * K + rank)
        total += weight * tl.load(outputs_ptr + (token * K + rank) * width + column, mask=inside, other=0.0)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def route(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int32 [T, k] in rank order and their weights float32 [T, k], for logits [T, E]."""
    tokens, num_experts = logits.shape
    if not 0 < k <= num_experts or logits.stride(1) != 1:
        raise ValueError(f"{k} of {num_experts} experts, {logits.stride(1)} apart")
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits,
            experts,
            weights,
            num_experts,
            logits.stride(0),
            K=k,
            RANKS=triton.next_power_of_2(k),
            RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
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
    exact: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x [T, H], logits [T, E], gate_up [E, 2 I, H] (gate first), down [E, H, I]; [T, H] in `dtype`."""
    experts, weights = route(logits, k, renormalise)
    num_experts, num_rows = len(gate_up), experts.numel()
    into, back = choose(num_rows, num_experts, exact=exact)
    groups = group_rows(experts, num_experts, into.rows)
    hidden = grouped_linear(x, gate_up, groups, num_rows, GroupedProduct(into, k, activation), x.dtype)[0]
    outputs = grouped_linear(hidden, down, groups, num_rows, GroupedProduct(back), torch.float32)[0]
    out = torch.empty(len(x), down.shape[1], dtype=dtype, device=x.device)
    if num_rows:
        grid = (len(x), triton.cdiv(out.shape[1], _SUM_BLOCK))
        combine_kernel[grid](outputs, weights, out, out.shape[1], K=k, BLOCK=_SUM_BLOCK)
    return out


def choose(num_rows: int, num_experts: int, *, exact: bool) -> tuple[Tile, Tile]:
    """The tiles of both products; in exact mode they do not depend on the number of rows."""
    if exact:
        return EXACT
    fitting = [tiles for rows, tiles in TILES.items() if num_rows <= rows * num_experts]
    return fitting[0] if fitting else TILES[max(TILES)]


_FLOATS = pointer(torch.float32)
SHIPPED = [
    *(
        form
        for name, (into, back) in (*((str(rows), tiles) for rows, tiles in TILES.items()), ("exact", EXACT))
        for form in (
            shipped(f"moe-gate_up-{name}", GroupedProduct(into, 8, "silu"), torch.bfloat16),
            shipped(f"moe-down-{name}", GroupedProduct(back), torch.float32),
        )
    ),
    KernelConfig(
        "moe-route-8-of-128",
        route_kernel,
        {
            "logits_ptr": _FLOATS,
            "experts_ptr": pointer(torch.int32),
            "weights_ptr": _FLOATS,
            "num_experts": "i32",
            "stride": "i32",
        },
        {"K": 8, "RANKS": 8, "RENORMALISE": True, "BLOCK": 128},
        ("logits_ptr", "experts_ptr", "weights_ptr", "num_experts", "stride"),
        num_warps=1,
    ),
    KernelConfig(
        "moe-combine-8",
        combine_kernel,
        {"outputs_ptr": _FLOATS, "weights_ptr": _FLOATS, "out_ptr": _FLOATS, "width": "i32"},
        {"K": 8, "BLOCK": _SUM_BLOCK},
        ("outputs_ptr", "weights_ptr", "out_ptr", "width"),
    ),
]
