"""A GGUF file: its metadata, and its tensors as they lie in the mapped file.

The `gguf` package's tables of types and block sizes, and its dequantisation, are used as they are.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from services.common.gguf_metadata import GGUF_ERRORS, GgufReader
from services.worker.model.errors import InvalidWeights
from services.worker.model.shard_source import RowsWanted

DEFAULT_ALIGNMENT = 32
# The format's own limit.
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first. data: its quantised bytes, uint8 [rows, bytes of a row].

    offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]
    offset: int

    def rows(self, rows: range) -> GgufTensor:
        """Some rows of its outermost dimension."""
        if len(rows) == self.shape[0]:
            return self
        inner = math.prod(self.shape[1:-1])
        data = self.data[rows.start * inner : rows.stop * inner]
        offset = self.offset + rows.start * inner * self.data.shape[1]
        return replace(self, shape=(len(rows), *self.shape[1:]), data=data, offset=offset)

    def dequantise(self) -> npt.NDArray[np.float32]:
        """The values in writable float32 memory, of `shape`. Raises InvalidWeights for an unknown quantisation."""
        try:
            values = gguf.quants.dequantize(self.data, self.kind)
        except NotImplementedError as error:
            raise InvalidWeights(f"tensor {self.name}: quantisation {self.kind.name} is not supported") from error
        return np.require(values, np.float32, "W").reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: scalars and strings (arrays of strings are skipped). tensors: views of the file, which stays mapped."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def in_memory(self, data: Mapping[str, npt.NDArray[np.uint8]]) -> GgufFile:
        """The same file with its tensors' bytes in memory: `data` has those of each, by name."""
        tensors = {
            name: replace(tensor, data=data[name].reshape(tensor.data.shape)) for name, tensor in self.tensors.items()
        }
        return GgufFile(self.metadata, tensors)

    def trimmed(self, wanted: RowsWanted) -> GgufFile:
        """The same file with the wanted rows of the wanted tensors alone. Raises InvalidWeights."""
        rows = {name: wanted(name, tensor.shape) for name, tensor in self.tensors.items()}
        tensors = {name: self.tensors[name].rows(part) for name, part in rows.items() if part is not None}
        return GgufFile(self.metadata, tensors)

    @property
    def weight_format(self) -> str:
        """Format and quantisations, such as "gguf:Q4_1,Q8_0"; what is kept in float32 beside them is left out."""
        kinds = {tensor.kind.name for tensor in self.tensors.values()}
        return f"gguf:{','.join(sorted(kinds - {'F32'} or kinds))}"


def read_gguf(path: Path) -> GgufFile:
    """Map a file and parse its header. Raises InvalidWeights when it is not GGUF, or cut short."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Parser(mapped).parse()
    except (*GGUF_ERRORS, KeyError) as error:
        raise InvalidWeights(f"{path.name} is not a readable GGUF file: {error}") from error


class _Parser:
    """Walks the header once, front to back."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._reader = GgufReader(mapped)

    def parse(self) -> GgufFile:
        reader, metadata = self._reader, {}
        for _ in range(reader.num_entries):
            name = reader.text()
            metadata[name] = reader.value(with_strings=False)
        entries = [self._tensor_entry() for _ in range(reader.num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment = {alignment!r}")
        base = reader.position + -reader.position % alignment
        tensors = [self._tensor(base, *entry) for entry in entries]
        _check_apart(tensors)
        return GgufFile(metadata, {tensor.name: tensor for tensor in tensors})

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        reader = self._reader
        name, num_dimensions = reader.text(), reader.unpack("<I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name[:80]}: {num_dimensions} dimensions")
        dimensions = [reader.unpack("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dimensions)), gguf.GGMLQuantizationType(reader.unpack("<I")), reader.unpack("<Q")

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, offset: int
    ) -> GgufTensor:
        if not all(shape):
            raise ValueError(f"tensor {name[:80]} holds no values")
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} values do not fill blocks of {block_values}")
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block_values * block_bytes
        start, end = base + offset, base + offset + rows * row_bytes
        if end > len(self._mapped):
            raise ValueError(f"tensor {name} ends at byte {end} of {len(self._mapped)}")
        data = np.frombuffer(self._mapped, np.uint8, rows * row_bytes, start)
        return GgufTensor(name, shape, kind, data.reshape(rows, row_bytes), start)


def _check_apart(tensors: Sequence[GgufTensor]) -> None:
    """Raise ValueError when two tensors have one name, or share bytes."""
    names: set[str] = set()
    end = 0
    for tensor in sorted(tensors, key=lambda one: (one.offset, one.data.nbytes)):
        if tensor.name in names:
            raise ValueError(f"tensor {tensor.name} occurs twice")
        if tensor.offset < end:
            raise ValueError(f"tensor {tensor.name} overlaps another one")
        names.add(tensor.name)
        end = tensor.offset + tensor.data.nbytes
