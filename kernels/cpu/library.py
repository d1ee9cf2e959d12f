"""The compiled CPU kernels: calls on torch tensors.

Torch must be imported before the library is opened: both then share one OpenMP runtime and its threads. Tensors are
passed by address, so the caller keeps them alive and contiguous; dtypes select the float32 or bfloat16 form.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_void_p
from enum import IntEnum
from functools import cache

import torch

from kernels.activation import Activation
from kernels.batch import PagedBatch
from kernels.cpu.build import find_or_build
from kernels.cpu.structs import (
    AttentionStruct,
    ExpertsStruct,
    LinearStruct,
    ModelStruct,
    ScratchStruct,
    batch_struct,
    pool_struct,
    rotary_struct,
)

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Epilogue(IntEnum):
    """What a linear layer does with its product: store it, add it to the output, or activation(gate) * up."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3


ACTIVATIONS: dict[Activation, Epilogue] = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}


@cache
def library() -> ctypes.CDLL:
    """The library, compiled first if need be. Raises BuildError, or OSError when it cannot be opened."""
    return ctypes.CDLL(str(find_or_build()))


def instruction_set() -> str:
    """avx512_bf16, avx512f or portable. Replicas agree to the last bit only where this agrees."""
    describe = library().kvm_instruction_set
    describe.restype = c_char_p
    return bytes(describe()).decode()


def _function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    function: ctypes._NamedFuncPointer = getattr(library(), f"kvm_{name}_{_SUFFIX[dtype]}")
    function.restype = None
    return function


def forward(
    model: ModelStruct, batch: PagedBatch, pool: torch.Tensor, scratch: ScratchStruct, *, num_threads: int
) -> bool:
    """One pass through all layers: KV goes to the pool, logits to scratch.logits; False when it was given up."""
    run = _function("forward", pool.dtype)
    run.restype = c_int
    pools = pool_struct(pool)
    return bool(run(byref(model), byref(batch_struct(batch)), byref(pools), byref(scratch), c_int(num_threads)) == 0)


def linear(x: torch.Tensor, layer: LinearStruct, epilogue: Epilogue, out: torch.Tensor, *, num_threads: int) -> None:
    """x [T, k]; out float32 [T, n], or [T, n / 2] in x's dtype for the gated epilogues."""
    run = _function("linear", x.dtype)
    pointers = c_void_p(x.data_ptr()), c_int(len(x)), byref(layer), c_int(epilogue), c_void_p(out.data_ptr())
    run(*pointers, c_int(out.shape[1]), c_int(num_threads))


def mixture(
    x: torch.Tensor, experts: ExpertsStruct, activation: Activation, out: torch.Tensor, *, num_threads: int
) -> None:
    """As kernels.moe.mixture with its routing, into float32 `out`."""
    run = _function("experts", x.dtype)
    run(
        c_void_p(x.data_ptr()),
        c_int(len(x)),
        byref(experts),
        c_int(ACTIVATIONS[activation]),
        c_void_p(out.data_ptr()),
        c_int(num_threads),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, num_threads: int) -> None:
    """As kernels.rms_norm, into `out`, whose dtype decides."""
    run = _function("rms_norm", out.dtype)
    shape = c_int(x.shape[0]), c_int(x.shape[1])
    tail = c_void_p(weight.data_ptr()), c_float(eps), c_void_p(out.data_ptr()), c_int(num_threads)
    run(c_void_p(x.data_ptr()), *shape, *tail)


def rotary_write(
    qkv: torch.Tensor,
    batch: PagedBatch,
    *,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    num_threads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As kernels.rotary.rotary_write."""
    query = torch.empty(len(qkv), heads, pool.shape[-1], dtype=pool.dtype)
    rotary = rotary_struct(cos, sin, q_norm, k_norm, eps)
    head = c_void_p(qkv.data_ptr()), byref(batch_struct(batch)), c_int(heads), byref(rotary)
    tail = byref(pool_struct(pool)), c_int(layer), c_void_p(query.data_ptr()), c_int(num_threads)
    _function("rotary_write", pool.dtype)(*head, *tail)
    return query


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    *,
    scale: float,
    num_threads: int,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As kernels.paged_attention.paged_attention."""
    out = torch.empty_like(query)
    head = c_void_p(query.data_ptr()), c_void_p(out.data_ptr()), byref(batch_struct(batch)), byref(pool_struct(pool))
    constants = AttentionStruct(layer, query.shape[1], scale, softcap, window)
    _function("attention", pool.dtype)(*head, byref(constants), c_int(num_threads))
    return out
