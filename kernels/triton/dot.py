"""The matrix product of tiles, as it is compiled and as it is interpreted."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter keeps bfloat16 as integers and would multiply those.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a times b, summed in float32. float32 operands: three TF32 products, close to full precision."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="tf32x3")
