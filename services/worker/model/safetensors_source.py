"""Tensors of a Hugging Face folder: one safetensors file, or shards listed in an index."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.regular_file import read_document
from services.common.artifacts.safetensors_header import StoredTensor, read_safetensors_header
from services.worker.model.errors import InvalidWeights
from services.worker.model.reading import Extent, WeightFile
from services.worker.model.shard_source import RowsWanted

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


class SafetensorsFolder:
    """The checked headers of all weight files of a folder; no tensor is read."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidWeights when there is no weight file, one cannot be read, or a name occurs twice."""
        self.stored: dict[str, StoredTensor] = {}
        self.files: list[WeightFile] = []
        expected = _index(folder)
        for path in _weight_files(folder, expected):
            try:
                tensors = read_safetensors_header(path)
            except InvalidArtifact as error:
                raise InvalidWeights(str(error)) from None
            for tensor in tensors:
                if tensor.name in self.stored:
                    raise InvalidWeights(f"tensor {tensor.name} occurs in two files")
                self.stored[tensor.name] = tensor
            self.files.append(WeightFile(path, tuple(map(_extent, tensors))))
            lacking = next(
                (name for name, file in expected.items() if file == path.name and name not in self.stored), ""
            )
            if lacking:
                raise InvalidWeights(f"{path.name} lacks tensor {lacking}, which {INDEX_FILE} places there")

    def trimmed(self, wanted: RowsWanted) -> SafetensorsFolder:
        """The same folder with the wanted rows of the wanted tensors alone. Raises InvalidWeights."""
        found = copy.copy(self)
        rows = {name: wanted(name, tensor.shape) for name, tensor in self.stored.items()}
        found.stored = {name: _rows_of(self.stored[name], part) for name, part in rows.items() if part is not None}
        kept = [[found.stored[one.name] for one in file.extents if one.name in found.stored] for file in self.files]
        found.files = [
            WeightFile(file.path, tuple(map(_extent, tensors))) for file, tensors in zip(self.files, kept, strict=True)
        ]
        return found


class SafetensorsSource:
    """A TensorSource over bytes that have been read."""

    centred_norms = True

    def __init__(self, folder: SafetensorsFolder, data: Mapping[str, torch.Tensor]) -> None:
        """data: uint8 of each tensor, by name."""
        self._stored = folder.stored
        self._data = data

    def names(self) -> set[str]:
        return set(self._stored)

    def read(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return self._data[name].view(DTYPES[stored.dtype]).view(stored.shape)


def _extent(tensor: StoredTensor) -> Extent:
    return Extent(tensor.name, tensor.offset, tensor.size)


def _rows_of(tensor: StoredTensor, rows: range) -> StoredTensor:
    if not tensor.shape or len(rows) == tensor.shape[0]:
        return tensor
    row_bytes = tensor.size // tensor.shape[0]
    return replace(
        tensor,
        shape=(len(rows), *tensor.shape[1:]),
        offset=tensor.offset + rows.start * row_bytes,
        size=len(rows) * row_bytes,
    )


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor as the index says; empty without one. Raises InvalidWeights."""
    try:
        placed = json.loads(read_document(folder / INDEX_FILE))["weight_map"]
        if not placed or not all(isinstance(file, str) for file in placed.values()):
            raise ValueError("its weight_map names no files")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidWeights(f"{INDEX_FILE} cannot be read: {error}") from error
    return dict(placed)


def _weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """The weight files of a folder, in a fixed order. Raises InvalidWeights."""
    if not index and not (folder / SINGLE_FILE).exists():
        raise InvalidWeights(f"{folder.name} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    names = sorted(set(index.values())) or [SINGLE_FILE]
    for name in names:
        if Path(name).name != name or not os.path.exists(folder / name):
            raise InvalidWeights(f"{INDEX_FILE} names {name[:80]}, which is not in the folder")
    return [folder / name for name in names]
