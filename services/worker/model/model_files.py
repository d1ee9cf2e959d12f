"""A model on disk: its configuration and its weight files, opened without reading a weight, and read in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from services.common.artifacts.chunk_reader import Progress
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.manifest import file_size, read_manifest
from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights
from services.worker.model.gguf_config import parse_gguf_config
from services.worker.model.gguf_file import GgufFile, read_gguf
from services.worker.model.gguf_source import GgufSource, hugging_face_name, layer_names_of
from services.worker.model.hf_config import read_hf_config
from services.worker.model.reading import Extent, SharedReading, WeightFile, read_weights
from services.worker.model.safetensors_source import SafetensorsFolder, SafetensorsSource
from services.worker.model.shard import Shard
from services.worker.model.shard_source import ShardSource, rows_wanted
from services.worker.model.text_part import TextPart, text_name
from services.worker.model.weights import TensorSource

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """An opened model: its configuration, its weight files, and how to view them once they are in memory.

    part: what one rank of a group reads of it, under names of its own (shard_source.py); raises InvalidWeights.
    """

    config: ModelConfig
    path: Path
    files: list[WeightFile]
    weight_format: str
    view: Callable[[Mapping[str, torch.Tensor]], TensorSource]
    part: Callable[[Shard], ModelFiles]

    def read(
        self, *, progress: Progress | None = None, pinned: bool = False, share: SharedReading | None = None
    ) -> tuple[TensorSource, bytes]:
        """Its tensors, in memory, and the digest of its weights: one pass over the files.

        A manifest beside the model is obeyed. pinned: memory that a GPU copies from. progress: told the bytes read.
        share: of one of several readers. Raises InvalidWeights.
        """
        started_s = time.perf_counter()
        try:
            manifest = read_manifest(self.path)
        except InvalidArtifact as error:
            raise InvalidWeights(str(error)) from None
        loaded = read_weights(self.files, manifest, progress=progress, pinned=pinned, share=share)
        took_s = time.perf_counter() - started_s
        rate = round(loaded.size / max(took_s, 1e-9) / 1e9, 2)
        log.info(
            "weights read", bytes=loaded.size, seconds=round(took_s, 2), gb_per_s=rate, sealed=manifest is not None
        )
        return self.view(loaded.tensors), loaded.digest

    @property
    def size(self) -> int:
        """Bytes of the weight files."""
        return sum(file_size(file.path) for file in self.files)


def open_model(path: Path) -> ModelFiles:
    """Open a folder or a GGUF file without reading weights. Raises UnsupportedModel or InvalidWeights."""
    if path.is_dir():
        return _folder_files(path, read_hf_config(path), SafetensorsFolder(path), None)
    if not path.is_file():
        raise InvalidWeights(f"{path.name}: no such model folder or GGUF file")
    file = read_gguf(path)
    return _gguf_files(path, parse_gguf_config(file), file, None, file.weight_format)


def _folder_files(path: Path, config: ModelConfig, folder: SafetensorsFolder, shard: Shard | None) -> ModelFiles:
    def view(data: Mapping[str, torch.Tensor]) -> TensorSource:
        return _of_shard(TextPart(SafetensorsSource(folder, data)), shard)

    def part(shard: Shard) -> ModelFiles:
        return _folder_files(path, config, folder.trimmed(rows_wanted(shard, text_name)), shard)

    return ModelFiles(config, path, folder.files, "safetensors", view, part)


def _gguf_files(path: Path, config: ModelConfig, file: GgufFile, shard: Shard | None, weight_format: str) -> ModelFiles:
    extents = tuple(Extent(one.name, one.offset, one.data.nbytes) for one in file.tensors.values())
    names = layer_names_of(config)

    def view(data: Mapping[str, torch.Tensor]) -> TensorSource:
        in_memory = file.in_memory({name: tensor.numpy() for name, tensor in data.items()})
        return _of_shard(GgufSource(in_memory, config), shard)

    def part(shard: Shard) -> ModelFiles:
        trimmed = file.trimmed(rows_wanted(shard, lambda name: hugging_face_name(name, names)))
        return _gguf_files(path, config, trimmed, shard, weight_format)

    return ModelFiles(config, path, [WeightFile(path, extents)], weight_format, view, part)


def _of_shard(source: TensorSource, shard: Shard | None) -> TensorSource:
    return source if shard is None else ShardSource(source, shard)
