"""A GGUF file: its metadata, and its tensors as they lie in the mapped file.

The header is parsed here because the reader of the `gguf` package makes an object of every token of the vocabulary,
which takes two seconds; its tables of types and block sizes are used as they are. Format: the GGUF specification,
version 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from services.worker.model.errors import InvalidWeights

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# struct formats of the scalar metadata types, by their number.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first. data: its quantised bytes, uint8 [rows, bytes of a row]."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    data: npt.NDArray[np.uint8]

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


def read_gguf(path: Path) -> GgufFile:
    """Map a file and parse its header. Raises InvalidWeights when it is not GGUF, or cut short."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Parser(mapped).parse()
    except (OSError, ValueError, struct.error, KeyError, UnicodeDecodeError) as error:
        raise InvalidWeights(f"{path.name} is not a readable GGUF file: {error}") from error


class _Parser:
    """Walks the header once, front to back."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes = mapped
        self._at = 0

    def parse(self) -> GgufFile:
        if self._bytes[:4] != MAGIC:
            raise ValueError("no GGUF magic")
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, only {VERSIONS} are known")
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_fields):
            name = self._string()
            metadata[name] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        base = self._at + -self._at % alignment
        return GgufFile(metadata, {entry[0]: self._tensor(base, *entry) for entry in entries})

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | None:
        kind, length = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            for _ in range(length):
                (size,) = struct.unpack_from("<Q", self._bytes, self._at)
                self._at += 8 + size
            return None
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        form = f"<{length}{_SCALARS[kind][1]}"
        values = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return list(values)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self._string()
        dimensions = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(dimensions)), gguf.GGMLQuantizationType(self._scalar("<I")), self._scalar("<Q")

    def _tensor(
        self, base: int, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, offset: int
    ) -> GgufTensor:
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} values do not fill blocks of {block_values}")
        rows, row_bytes = int(np.prod(shape[:-1])), shape[-1] // block_values * block_bytes
        data = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, base + offset)
        return GgufTensor(name, shape, kind, data.reshape(rows, row_bytes))
