"""The C structures of the compiled kernels (kernels/cpu/src), and how tensors get into them: by address.

Who makes a structure keeps its tensors alive and contiguous.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p

import numpy as np
import torch

from kernels.batch import Int32Array, PagedBatch
from kernels.cpu.packing import PackedLinear


class LinearStruct(Structure):
    """A packed linear layer: a PackedLinear by address."""

    _fields_ = (
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
        ("n", c_int),
        ("k", c_int),
        ("format", c_int),
        ("group", c_int),
    )


class RotaryStruct(Structure):
    """The rotary embedding of one layer, and the normalisation of heads before it."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("dim", c_int),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
    )


class ExpertsStruct(Structure):
    """A mixture of experts, of which [first, first + held) are here; count 0: none."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", POINTER(LinearStruct)),
        ("down", POINTER(LinearStruct)),
        ("count", c_int),
        ("first", c_int),
        ("held", c_int),
        ("per_token", c_int),
        ("intermediate", c_int),
        ("renormalise", c_int),
    )


class LayerStruct(Structure):
    """One decoder layer."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("rotary", RotaryStruct),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("experts", ExpertsStruct),
        ("mlp_post_norm", c_void_p),
        ("window", c_int),
    )


class AdapterPartStruct(Structure):
    """One projection's part of a linear layer's output."""

    _fields_ = (
        ("up", c_void_p),
        ("n", c_int),
        ("rank", c_int),
        ("low", c_int),
        ("first", c_int),
        ("step", c_int),
        ("scaling", c_float),
    )


MAX_PARTS = 3


class AdapterInputStruct(Structure):
    """The adapted projections that one linear layer joins."""

    _fields_ = (
        ("down", c_void_p),
        ("ranks", c_int),
        ("num_parts", c_int),
        ("parts", AdapterPartStruct * MAX_PARTS),
    )


class AdapterLayerStruct(Structure):
    """One layer of an adapter."""

    _fields_ = (
        ("qkv", AdapterInputStruct),
        ("output", AdapterInputStruct),
        ("gate_up", AdapterInputStruct),
        ("down", AdapterInputStruct),
    )


# Sums so many float32 at an address in place over the ranks of a group; not 0: the pass is given up.
SumOverRanks = CFUNCTYPE(c_int, c_void_p, c_int64)


class ModelStruct(Structure):
    """A decoder, or a rank's part of it."""

    _fields_ = (
        ("num_layers", c_int),
        ("hidden", c_int),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("intermediate", c_int),
        ("activation", c_int),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("attention_softcap", c_float),
        ("logit_softcap", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("first_token", c_int),
        ("num_tokens", c_int),
        ("layers", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
        ("adapters", c_void_p),
        ("sum_over_ranks", SumOverRanks),
    )


class ScratchStruct(Structure):
    """Working memory of one step."""

    _fields_ = (
        ("residual", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("query", c_void_p),
        ("activation", c_void_p),
        ("projected", c_void_p),
        ("gains", c_void_p),
        ("logits", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class AttentionStruct(Structure):
    """Constants of one attention call."""

    _fields_ = (("layer", c_int), ("heads", c_int), ("scale", c_float), ("softcap", c_float), ("window", c_int))


class BatchStruct(Structure):
    """A PagedBatch by address."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("adapters", c_void_p),
        ("num_tokens", c_int),
        ("num_seqs", c_int),
        ("table_width", c_int),
        ("num_logits", c_int),
    )


class PoolStruct(Structure):
    """A KV pool by address."""

    _fields_ = (
        ("base", c_void_p),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("block_heads", c_int),
        ("block_layers", c_int),
    )


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
        None if batch.adapters is None else _address(batch.adapters),
        batch.num_tokens,
        len(batch.context_lens),
        batch.block_tables.shape[1],
        len(batch.logit_rows),
    )


def pool_struct(pool: torch.Tensor) -> PoolStruct:
    """A pool [blocks, kv_heads, layers, 2, 16, head_dim], or some heads and layers of a larger one, by address."""
    block, head, layer = pool.stride()[:3]
    return PoolStruct(pool.data_ptr(), pool.shape[1], pool.shape[5], block // head, head // layer)


def _optional(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def linear_struct(layer: PackedLinear) -> LinearStruct:
    """A packed layer by address: valid while its tensors live."""
    tensors = layer.weight.data_ptr(), _optional(layer.scales), _optional(layer.sums), _optional(layer.bias)
    return LinearStruct(*tensors, layer.n, layer.k, layer.format, layer.group)


def rotary_struct(
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> RotaryStruct:
    """Tables [positions, rotary_dim / 2] and norm weights by address: valid while they live."""
    return RotaryStruct(cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1], _optional(q_norm), _optional(k_norm), eps)
