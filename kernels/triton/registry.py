"""The compiled forms that are shipped: what ahead-of-time compilation builds and checks for each architecture.

Every module of this package that holds kernels lists its forms in `SHIPPED: list[KernelConfig]`; kernels/triton/compile
finds the lists by that name. A form is one specialisation: argument types, constants and launch options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# Compute capability to the shared memory one program may use, in bytes.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}

TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class KernelConfig:
    """One specialisation of a kernel.

    kernel: what @triton.jit made. signature: the Triton type of each argument that is not in `constants`, in any order:
    "*bf16", "i32", "fp32". constants: values of its constexpr arguments; None also for pointers that are not given.
    aligned: arguments that are multiples of 16 (pointers: in bytes), as the launcher guarantees. architectures:
    compute capabilities it is shipped for.
    """

    name: str
    kernel: object
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, object] = field(default_factory=dict)
    architectures: tuple[int, ...] = (80, 90)


def pointer(dtype: torch.dtype) -> str:
    """The Triton type of a pointer to elements of `dtype`."""
    return "*" + TRITON_TYPES[dtype]
