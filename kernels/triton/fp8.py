"""FP8 e4m3 as bytes, in arithmetic that every device has (the type itself needs compute capability 8.9)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(bits: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """float16, exactly the number of each e4m3 byte. NATIVE: the device has the type.

    Otherwise exponent and mantissa are moved to their places in a float16, and the exponent's bias corrected from 15 to
    7; the two bytes that are no number, 0x7f and 0xff, then become 480.
    """
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = bits.to(tl.int16)
    fields = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return fields.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """uint8, the e4m3 byte nearest to float32 x (ties to even), at most 448 in size. x is finite."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    raised = size.to(tl.int32, bitcast=True)
    # Round the mantissa to 3 bits, then the bias from 127 to 7; a carry moves into the exponent as it should.
    normal = ((raised + 0x7FFFF + ((raised >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 steps are 2 ** -9; adding 1.5 * 2 ** 23 rounds to an integer, and 8 of them are the least normal.
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    coded = tl.where(size < 0.015625, small, normal)
    return (coded | ((bits >> 24) & 0x80)).to(tl.uint8)
