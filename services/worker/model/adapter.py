"""A low-rank adapter for one model: its matrices by layer, checked against the configuration, in the compute dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kernels.lora import LowRank
from services.common.adapter_files import AdaptedProjection, AdapterTensor, InvalidAdapter, read_adapter
from services.worker.model.config import ModelConfig

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ATTENTION = frozenset(("q", "k", "v", "o"))


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """layers: of each layer the adapted projections by name (q, k, v, o, gate, up, down). digest: 16 bytes."""

    layers: tuple[Mapping[str, LowRank], ...]
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """Memory of the matrices."""
        matrices = (one for layer in self.layers for one in layer.values())
        return sum(one.down.nbytes + one.up.nbytes for one in matrices)


class PreparedAdapter(Protocol):
    """An adapter as a decoder wants it."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""


class AdapterTable(Protocol):
    """Where a decoder has its adapters: numbered slots, which the batch's sequences refer to."""

    num_slots: int

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        """The adapter as the decoder wants it; on any thread."""

    def put(self, slot: int, prepared: PreparedAdapter | None) -> None:
        """Let a slot have an adapter, or none; while no step that uses the slot is under way."""


def load_adapter(
    folder: Path, config: ModelConfig, dtype: torch.dtype, *, max_rank: int, max_bytes: int | None = None
) -> AdapterWeights:
    """Read a PEFT folder for a model. max_bytes: of its matrices in memory. Raises InvalidAdapter."""
    most = None if max_bytes is None else max_bytes // dtype.itemsize
    files = read_adapter(folder, max_rank=max_rank, max_parameters=most)
    layers: tuple[dict[str, LowRank], ...] = tuple({} for _ in range(config.num_layers))
    for one in files.projections:
        _check_place(one, config)
        layers[one.layer][one.name] = LowRank(_matrix(one.down, dtype), _matrix(one.up, dtype), files.scaling)
    return AdapterWeights(layers, files.digest)


def projection_shape(name: str, config: ModelConfig) -> tuple[int, int]:
    """[n, k] of a projection."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    if name in _ATTENTION:
        outputs = {"q": query, "o": hidden}.get(name, config.num_kv_heads * config.head_dim)
        return outputs, query if name == "o" else hidden
    return (hidden, config.intermediate_size) if name == "down" else (config.intermediate_size, hidden)


def _check_place(one: AdaptedProjection, config: ModelConfig) -> None:
    if one.layer >= config.num_layers:
        raise InvalidAdapter(f"the adapter is for layer {one.layer}: the model has {config.num_layers} layers")
    if one.name not in _ATTENTION and config.is_sparse(one.layer):
        raise InvalidAdapter(
            f"{one.name}_proj of layer {one.layer}: the model has experts there, which are not adapted"
        )
    rows, columns = projection_shape(one.name, config)
    if (one.up.shape[0], one.down.shape[1]) != (rows, columns):
        found = f"{one.up.shape[0]} x {one.down.shape[1]}"
        raise InvalidAdapter(f"{one.name}_proj of layer {one.layer} is {found} in the adapter, {rows} x {columns} here")


def _matrix(tensor: AdapterTensor, dtype: torch.dtype) -> torch.Tensor:
    stored = torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype])
    return stored.view(tensor.shape).to(dtype).contiguous()
