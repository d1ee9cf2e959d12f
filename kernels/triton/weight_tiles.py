"""Tiles of quantised weights on their way to a matrix product: unpacked, less their zeros, scaled, in a float dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.dot import INTERPRETED

# Four bytes in, four 16-bit floats in two registers out.
_FOUR = tl.constexpr("=r,=r,r")


def _assembly(shift: int, kind: str, base: int, one: int, less: int) -> tl.constexpr:
    """Four bits of each byte onto the float `base` (upper byte), times one, less that float and 8."""
    return tl.constexpr(f"""{{
        .reg .b32 bits, magic, one, less;
        shr.b32 bits, $2, {shift};
        and.b32 bits, bits, 0x0f0f0f0f;
        mov.b32 magic, {base:#x};
        mov.b32 one, {one:#x};
        mov.b32 less, {less:#x};
        prmt.b32 $0, bits, magic, 0x4140;
        prmt.b32 $1, bits, magic, 0x4342;
        fma.rn.{kind}x2 $0, $0, one, less;
        fma.rn.{kind}x2 $1, $1, one, less;
    }}""")


# 128 + v in bfloat16, then - 136; 1024 + v in float16, then - 1032.
_LOW_BF16 = _assembly(0, "bf16", 0x43, 0x3F803F80, 0xC308C308)
_HIGH_BF16 = _assembly(4, "bf16", 0x43, 0x3F803F80, 0xC308C308)
_LOW_FP16 = _assembly(0, "f16", 0x64, 0x3C003C00, 0xE408E408)
_HIGH_FP16 = _assembly(4, "f16", 0x64, 0x3C003C00, 0xE408E408)


@triton.jit
def converted(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Values in the activations' dtype; the interpreter cannot turn integers into bfloat16."""
    return values.to(tl.float32).to(dtype) if INTERPRETED else values.to(dtype)


@triton.jit
def nibbles(packed: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Low and high halves of bytes, less 8, in the activations' dtype.

    For 16-bit floats four at a time: a number whose last bits count in ones takes the four bits there and loses itself
    and 8 in one exact operation (as in FasterTransformer's converters; Kim et al., 2022).
    """
    if INTERPRETED or dtype == tl.float32:
        low = ((packed & 15).to(tl.int8) - 8).to(tl.float32).to(dtype)
        high = ((packed >> 4).to(tl.int8) - 8).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(_LOW_BF16, _FOUR, [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_BF16, _FOUR, [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        low = tl.inline_asm_elementwise(_LOW_FP16, _FOUR, [packed], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_FP16, _FOUR, [packed], dtype=tl.float16, is_pure=True, pack=4)
    return low, high


@triton.jit
def less_zero(values: tl.tensor, zero: tl.tensor) -> tl.tensor:
    """Values [k, n] less the zero of each of n, in the values' dtype."""
    if INTERPRETED:
        return (values.to(tl.float32) - zero[None, :]).to(values.dtype)
    return values - zero.to(values.dtype)[None, :]


@triton.jit
def scaled(
    values: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    column: tl.tensor,
    start: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    GROUP: tl.constexpr,
    PER_BYTE: tl.constexpr,
) -> tl.tensor:
    """Values of one weight tile, times their groups' scales: several groups of one tile."""
    LENGTH: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1]
    COUNT: tl.constexpr = LENGTH * PER_BYTE // GROUP
    group = start // GROUP + tl.arange(0, COUNT)
    place = column[None, :] * (k // GROUP) + group[:, None]
    mask = (column[None, :] < n) & (group[:, None] < k // GROUP)
    grouped = tl.reshape(values.to(tl.float32), (COUNT, LENGTH // COUNT, WIDTH))
    if zero_ptr is not None:
        grouped -= tl.load(zero_ptr + place, mask=mask, other=0.0)[:, None, :]
    grouped *= tl.load(scale_ptr + place, mask=mask, other=0.0)[:, None, :]
    return tl.reshape(grouped, (LENGTH, WIDTH))
