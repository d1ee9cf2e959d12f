"""The tensors of a decoder, under one set of names, whatever file they came from.

A `TensorSource` answers for Hugging Face's names; `load_weights` asks it for everything the configuration implies,
checks each shape and converts to the compute dtype. Projections may be stored one by one or joined (Phi-3), experts one
by one or stacked. Norm weights and biases are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights

# Architectures whose authors store norm weights minus one.
_CENTRED_NORMS = frozenset(("gemma2", "gemma3"))
# Where a layer's experts lie, and the names of gate, up and down: of Mixtral, and of all others.
_EXPERT_SCHEMES = (
    ("block_sparse_moe.", "w1", "w3", "w2"),
    ("mlp.", "gate_proj", "up_proj", "down_proj"),
)


class TensorSource(Protocol):
    """Where tensors come from. centred_norms: whether Gemma's norm weights still lack the one that its authors add."""

    centred_norms: bool

    def names(self) -> set[str]:
        """Hugging Face names of all tensors present."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, floating point, in any dtype."""


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate, up: [intermediate, hidden]; down: [hidden, intermediate]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """E experts of size I. router: [E, hidden]; gate_up: [E, 2 I, hidden], gate first; down: [E, hidden, I].

    A rank that holds only some experts has the others in its router alone.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """[out, in] matrices. qkv: queries, keys, values below each other. q_norm, k_norm: [head_dim].

    Post norms: of the outputs of attention and MLP, before they join the residual stream.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: MlpWeights | ExpertWeights
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding and head: [vocab_size, hidden]; the same tensor when tied. Without rows where another rank has them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """What multiplies embeddings: rounded to the compute dtype, as Gemma's authors do."""
    return torch.tensor(config.embedding_scale, dtype=dtype).item()


def load_weights(
    source: TensorSource, config: ModelConfig, dtype: torch.dtype, *, first: bool = True, last: bool = True
) -> ModelWeights:
    """Read and check all weights. Raises InvalidWeights naming a tensor that is missing, misshapen or left over.

    first, last: whether the layers are the model's first, behind its embedding, and its last, before norm and head.
    """
    offset = 1.0 if source.centred_norms and config.architecture in _CENTRED_NORMS else 0.0
    reader = _Reader(source, config, dtype, offset)
    nothing = torch.empty(0, config.hidden_size, dtype=dtype)
    embedding = head = nothing
    if first:
        embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(reader.layer(index) for index in range(config.num_layers))
    final_norm = reader.norm("model.norm.weight", config.hidden_size) if last else torch.empty(0)
    if config.tie_embeddings:
        head = embedding
        reader.used.add("lm_head.weight")
    elif last:
        head = reader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    left_over = sorted(name for name in source.names() - reader.used if not name.endswith("rotary_emb.inv_freq"))
    if left_over:
        raise InvalidWeights(f"tensor {left_over[0]} has no place in this model ({len(left_over)} such)")
    return ModelWeights(embedding, layers, final_norm, head)


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
    def __init__(self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, norm_offset: float) -> None:
        self._source = source
        self._config = config
        self._dtype = dtype
        self._norm_offset = norm_offset
        self._present = source.names()
        self.used: set[str] = set()

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, attention = config.hidden_size, f"model.layers.{index}.self_attn."
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size))
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        return LayerWeights(
            attention_norm=self.norm(prefix + "input_layernorm.weight", hidden),
            qkv=self._joined(attention, "qkv_proj", parts, hidden),
            qkv_bias=self._joined_bias(attention, parts) if config.qkv_bias else None,
            output=self.matrix(attention + "o_proj.weight", hidden, query_size),
            output_bias=self.vector(attention + "o_proj.bias", hidden) if config.output_bias else None,
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight", hidden),
            mlp=self._experts(prefix) if config.is_sparse(index) else self._mlp(prefix + "mlp."),
            q_norm=self.norm(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            attention_post_norm=self._post_norm(prefix + "post_attention_layernorm.weight"),
            mlp_post_norm=self._post_norm(prefix + "post_feedforward_layernorm.weight"),
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        hidden, size = self._config.hidden_size, self._config.intermediate_size
        joined = self._joined(prefix, "gate_up_proj", (("gate_proj", size), ("up_proj", size)), hidden)
        return MlpWeights(joined[:size], joined[size:], self.matrix(prefix + "down_proj.weight", hidden, size))

    def _experts(self, layer: str) -> ExpertWeights:
        moe, hidden = self._config.moe, self._config.hidden_size
        assert moe is not None
        count, size = len(moe.held), moe.intermediate_size
        where, *names = next(
            (s for s in _EXPERT_SCHEMES if f"{layer}{s[0]}gate.weight" in self._present), _EXPERT_SCHEMES[1]
        )
        router = self.matrix(f"{layer}{where}gate.weight", moe.num_experts, hidden)
        prefix = f"{layer}{where}experts."
        if f"{prefix}gate_up_proj" in self._present:
            gate_up = self._stacked(f"{prefix}gate_up_proj", (count, 2 * size, hidden))
            return ExpertWeights(router, gate_up, self._stacked(f"{prefix}down_proj", (count, hidden, size)))
        if f"{prefix}gate_proj" in self._present:
            parts = [self._stacked(f"{prefix}{name}", (count, size, hidden)) for name in ("gate_proj", "up_proj")]
            return ExpertWeights(
                router, torch.cat(parts, 1), self._stacked(f"{prefix}down_proj", (count, hidden, size))
            )
        gate_up = torch.empty(count, 2 * size, hidden, dtype=self._dtype)
        down = torch.empty(count, hidden, size, dtype=self._dtype)
        gate_name, up_name, down_name = names
        for place, expert in enumerate(moe.held):
            gate_up[place, :size] = self.matrix(f"{prefix}{expert}.{gate_name}.weight", size, hidden)
            gate_up[place, size:] = self.matrix(f"{prefix}{expert}.{up_name}.weight", size, hidden)
            down[place] = self.matrix(f"{prefix}{expert}.{down_name}.weight", hidden, size)
        return ExpertWeights(router, gate_up, down)

    def _joined(self, prefix: str, joined: str, parts: Sequence[tuple[str, int]], columns: int) -> torch.Tensor:
        """Rows of several projections below each other, however they are stored."""
        if f"{prefix}{joined}.weight" in self._present:
            return self.matrix(f"{prefix}{joined}.weight", sum(size for _, size in parts), columns)
        return torch.cat([self.matrix(f"{prefix}{name}.weight", size, columns) for name, size in parts])

    def _joined_bias(self, prefix: str, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        return torch.cat([self.vector(f"{prefix}{name}.bias", size) for name, size in parts])

    def _post_norm(self, name: str) -> torch.Tensor | None:
        return self.norm(name, self._config.hidden_size) if self._config.post_norms else None

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._stacked(name, (rows, columns))

    def _stacked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape).to(self._dtype).contiguous()

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.vector(name, size) + self._norm_offset

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
