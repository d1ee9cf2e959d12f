"""The tensors of a Llama decoder, under one set of names, whatever file they came from.

A `TensorSource` answers for Hugging Face's names; `load_weights` asks it for everything the configuration implies,
checks each shape and converts to the compute dtype. Norm weights and biases are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights


class TensorSource(Protocol):
    """Where tensors come from."""

    def names(self) -> set[str]:
        """Hugging Face names of all tensors present."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, floating point, in any dtype."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """[out, in] matrices. qkv: queries, keys, values below each other; gate_up likewise."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """embedding and head: [vocab_size, hidden]; the same tensor when tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def load_weights(source: TensorSource, config: ModelConfig, dtype: torch.dtype) -> LlamaWeights:
    """Read and check all weights. Raises InvalidWeights naming a tensor that is missing, misshapen or left over."""
    reader = _Reader(source, config, dtype)
    embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    final_norm = reader.vector("model.norm.weight", config.hidden_size)
    head = embedding
    if config.tie_embeddings:
        reader.used.add("lm_head.weight")
    else:
        head = reader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    left_over = sorted(name for name in source.names() - reader.used if not name.endswith("rotary_emb.inv_freq"))
    if left_over:
        raise InvalidWeights(f"tensor {left_over[0]} has no place in this model ({len(left_over)} such)")
    return LlamaWeights(embedding, layers, final_norm, head)


def weight_bytes(weights: object) -> int:
    """Memory of all tensors in a tree of dataclasses and tuples; a tensor that is there twice counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(weights)}
    return sum(storages.values())


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _tensors(item)
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name))


class _Reader:
    def __init__(self, source: TensorSource, config: ModelConfig, dtype: torch.dtype) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._present = source.names()
        self.used: set[str] = set()

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, intermediate = config.hidden_size, config.intermediate_size
        attention = prefix + "self_attn."
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size))
        qkv_bias = output_bias = None
        if config.qkv_bias:
            qkv_bias = torch.cat([self.vector(f"{attention}{name}.bias", size) for name, size in parts])
        if config.output_bias:
            output_bias = self.vector(f"{attention}o_proj.bias", hidden)
        return LayerWeights(
            attention_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            qkv=torch.cat([self.matrix(f"{attention}{name}.weight", size, hidden) for name, size in parts]),
            qkv_bias=qkv_bias,
            output=self.matrix(attention + "o_proj.weight", hidden, query_size),
            output_bias=output_bias,
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            gate=self.matrix(prefix + "mlp.gate_proj.weight", intermediate, hidden),
            up=self.matrix(prefix + "mlp.up_proj.weight", intermediate, hidden),
            down=self.matrix(prefix + "mlp.down_proj.weight", hidden, intermediate),
        )

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._read(name, (rows, columns)).to(self._dtype).contiguous()

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._read(name, (size,)).float().contiguous()

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._present:
            raise InvalidWeights(f"tensor {name} is missing")
        self.used.add(name)
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise InvalidWeights(f"tensor {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}")
        if not tensor.is_floating_point():
            raise InvalidWeights(f"tensor {name} has dtype {tensor.dtype}: only floating point is supported")
        return tensor
