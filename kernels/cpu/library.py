"""The compiled CPU kernels: their C structures, and calls on torch tensors.

Torch must be imported before the library is opened: both then share one OpenMP runtime and its threads. Tensors are
passed by address, so the caller keeps them alive and contiguous; dtypes select the float32 or bfloat16 form.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np
import torch

from kernels.batch import Int32Array, PagedBatch
from kernels.cpu.build import find_or_build

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class LinearStruct(Structure):
    """A packed linear layer; `weight` as made by kernels.linear.pack_weight."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("n", c_int), ("k", c_int))


class LayerStruct(Structure):
    """One decoder layer."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("mlp_norm", c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
    )


class ModelStruct(Structure):
    """A whole decoder."""

    _fields_ = (
        ("num_layers", c_int),
        ("hidden", c_int),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("intermediate", c_int),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("layers", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
    )


class ScratchStruct(Structure):
    """Working memory of one step."""

    _fields_ = (
        ("residual", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("query", c_void_p),
        ("activation", c_void_p),
        ("logits", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class BatchStruct(Structure):
    """A PagedBatch by address."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("num_tokens", c_int),
        ("num_seqs", c_int),
        ("table_width", c_int),
        ("num_logits", c_int),
    )


class PoolStruct(Structure):
    """A KV pool by address."""

    _fields_ = (("base", c_void_p), ("kv_heads", c_int), ("layers", c_int), ("head_dim", c_int))


class Epilogue(IntEnum):
    """What a linear layer does with its product: store it, add it to the output, or silu(gate) * up."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2


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


def _address(array: Int32Array) -> int:
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    return array.ctypes.data


def batch_struct(batch: PagedBatch) -> BatchStruct:
    """The batch by address: valid while `batch` lives."""
    return BatchStruct(
        *map(_address, (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens)),
        _address(batch.block_tables),
        _address(batch.logit_rows),
        batch.num_tokens,
        len(batch.context_lens),
        batch.block_tables.shape[1],
        len(batch.logit_rows),
    )


def pool_struct(pool: torch.Tensor) -> PoolStruct:
    """A pool [blocks, kv_heads, layers, 2, 16, head_dim] by address."""
    return PoolStruct(pool.data_ptr(), pool.shape[1], pool.shape[2], pool.shape[5])


def linear_struct(packed: torch.Tensor, n: int, k: int, bias: torch.Tensor | None = None) -> LinearStruct:
    """A packed layer by address: valid while its tensors live."""
    return LinearStruct(packed.data_ptr(), None if bias is None else bias.data_ptr(), n, k)


def forward(
    model: ModelStruct, batch: PagedBatch, pool: torch.Tensor, scratch: ScratchStruct, *, num_threads: int
) -> None:
    """One pass through all layers: KV goes to the pool, logits to scratch.logits."""
    run = _function("forward", pool.dtype)
    run(byref(model), byref(batch_struct(batch)), c_void_p(pool.data_ptr()), byref(scratch), c_int(num_threads))


def linear(x: torch.Tensor, layer: LinearStruct, epilogue: Epilogue, out: torch.Tensor, *, num_threads: int) -> None:
    """x [T, k]; out float32 [T, n], or [T, n / 2] in x's dtype for SILU_MUL."""
    run = _function("linear", x.dtype)
    pointers = c_void_p(x.data_ptr()), c_int(len(x)), byref(layer), c_int(epilogue), c_void_p(out.data_ptr())
    run(*pointers, c_int(num_threads))


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
) -> torch.Tensor:
    """As kernels.rotary.rotary_write."""
    query = torch.empty(len(qkv), heads, pool.shape[-1], dtype=pool.dtype)
    tables = c_void_p(cos.data_ptr()), c_void_p(sin.data_ptr())
    head = c_void_p(qkv.data_ptr()), byref(batch_struct(batch)), c_int(heads), *tables
    tail = byref(pool_struct(pool)), c_int(layer), c_void_p(query.data_ptr()), c_int(num_threads)
    _function("rotary_write", pool.dtype)(*head, *tail)
    return query


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, batch: PagedBatch, *, scale: float, num_threads: int
) -> torch.Tensor:
    """As kernels.paged_attention.paged_attention."""
    out = torch.empty_like(query)
    head = c_void_p(query.data_ptr()), c_void_p(out.data_ptr()), byref(batch_struct(batch)), byref(pool_struct(pool))
    _function("attention", pool.dtype)(*head, c_int(layer), c_int(query.shape[1]), c_float(scale), c_int(num_threads))
    return out
