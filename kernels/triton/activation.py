"""SiLU or GELU (tanh) and multiply over a fused gate and up projection, as kernels/activation.py specifies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.activation import Activation
from kernels.triton.registry import KernelConfig, pointer

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def gated_multiply(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """activation(gate) * up in float32. tanh-GELU is x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    # The bound keeps exp finite; beyond it the result is 0 in any dtype.
    return gate / (1.0 + tl.exp(tl.minimum(-scaled, 80.0))) * up


@triton.jit
def gated_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, GELU: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    result = gated_multiply(gate, up, GELU)
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


def gated(
    gate_up: torch.Tensor, activation: Activation, *, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """gate_up [T, 2 I], contiguous, the gate first; [T, I] in `dtype`, written to `out` where given."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous")
    if out is None:
        out = torch.empty(rows, width, dtype=dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        gated_kernel[grid](gate_up, out, width, GELU=activation == "gelu_tanh", BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out


SHIPPED = [
    KernelConfig(
        f"gated-{activation}-{str(source).removeprefix('torch.')}",
        gated_kernel,
        {"gate_up_ptr": pointer(source), "out_ptr": pointer(torch.bfloat16), "width": "i32"},
        {"GELU": activation == "gelu_tanh", "BLOCK": _BLOCK},
        ("gate_up_ptr", "out_ptr", "width"),
        num_warps=_NUM_WARPS,
    )
    for activation in ("silu", "gelu_tanh")
    for source in (torch.float32, torch.bfloat16)
]
