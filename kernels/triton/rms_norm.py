"""RMS normalisation with the residual's addition, in place: one program a row, so a row's result is always the same.

Bound by memory: each element is read and written once, everything between stays in registers. See kernels/rms_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.registry import KernelConfig, pointer

_MAX_WIDTH = 32768


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    post_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_POST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_POST:
        post = tl.load(post_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * post
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        rounded = (residual.to(tl.float32) + values).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * weight
    tl.store(out_ptr + row * width + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of x [T, width] (rows may lie apart), in `dtype`; written to `out` [T, width] where given."""
    out = _output(x, dtype, out)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
    post_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x, or its norm with `post_weight`, to `residual` in place; returns the norm of that sum."""
    out = _output(x, dtype, out)
    _launch(x, residual, weight, post_weight, out, eps)
    return out


def _output(x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    post_weight: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    rows, width = x.shape
    if not 0 < width <= _MAX_WIDTH or x.stride(1) != 1:
        raise ValueError(f"rows of {width} elements, {x.stride(1)} apart: at most {_MAX_WIDTH}, contiguous")
    if not rows:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        post_weight,
        out,
        width,
        x.stride(0),
        eps,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_POST=post_weight is not None,
        num_warps=num_warps(block),
    )


def num_warps(block: int) -> int:
    """16 elements a thread, within what a program may have."""
    return min(max(block // 512, 1), 16)


def _shipped(name: str, width: int, x: torch.dtype, *, residual: bool, post: bool) -> KernelConfig:
    block = triton.next_power_of_2(width)
    signature = {
        "x_ptr": pointer(x),
        "weight_ptr": pointer(torch.float32),
        "out_ptr": pointer(torch.bfloat16),
        "width": "i32",
        "x_stride": "i32",
        "eps": "fp32",
    }
    constants: dict[str, object] = {"BLOCK": block, "HAS_RESIDUAL": residual, "HAS_POST": post}
    for argument, given in (("residual_ptr", residual), ("post_weight_ptr", post)):
        if given:
            signature[argument] = pointer(torch.float32)
        else:
            constants[argument] = None
    aligned = (*(n for n in signature if n.endswith("_ptr")), "width", "x_stride")
    return KernelConfig(name, rms_norm_kernel, signature, constants, aligned, num_warps=num_warps(block))


SHIPPED = [
    _shipped("rms_norm-4096", 4096, torch.float32, residual=False, post=False),
    _shipped("add_rms_norm-4096", 4096, torch.float32, residual=True, post=False),
    _shipped("add_rms_norm-8192", 8192, torch.bfloat16, residual=True, post=False),
    _shipped("post_add_rms_norm-3584", 3584, torch.float32, residual=True, post=True),
]
