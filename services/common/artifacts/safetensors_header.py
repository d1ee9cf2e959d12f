"""The header of a safetensors file: which tensor lies where. Everything it says is checked against the file.

Format: https://huggingface.co/docs/safetensors: a little-endian u64 length, that much JSON, then the tensors without
gaps or overlaps to the end of the file.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.regular_file import open_regular

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
# Of no tensor; without an end, sizes would take for ever to multiply, and no longer fit what they are passed to.
MAX_DIMENSIONS = 8
_LARGEST_COUNT = 2**48
_NAMES_BY_BYTES = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    2: ("I16", "U16", "F16", "BF16"),
    4: ("I32", "U32", "F32"),
    8: ("I64", "U64", "F64"),
}
ITEM_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """offset: of its first byte in the file; size: bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_safetensors_header(path: Path) -> list[StoredTensor]:
    """All tensors in the order of their bytes. Raises InvalidArtifact with one line."""
    try:
        with open(open_regular(path), "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            data, base = _header(file.read(_LENGTH.size), file_bytes)
            tensors = _tensors(json.loads(file.read(data)), base, file_bytes)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArtifact(f"{path.name} is not a readable safetensors file: {error}") from None
    return tensors


def _header(length: bytes, file_bytes: int) -> tuple[int, int]:
    """Bytes of the JSON, and where the tensors begin."""
    if len(length) < _LENGTH.size:
        raise ValueError(f"{file_bytes} bytes hold no header")
    (size,) = _LENGTH.unpack(length)
    if size > min(MAX_HEADER_BYTES, file_bytes - _LENGTH.size):
        raise ValueError(f"a header of {size} bytes in a file of {file_bytes}")
    return size, _LENGTH.size + size


def _tensors(header: Any, base: int, file_bytes: int) -> list[StoredTensor]:
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    tensors = [_tensor(name, entry, base) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    position = base
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps another one" if tensor.offset < position else "leaves a gap before it"
            raise ValueError(f"tensor {tensor.name} {what}")
        position += tensor.size
        if position > file_bytes:
            raise ValueError(f"tensor {tensor.name} ends at byte {position} of {file_bytes}")
    if position != file_bytes:
        raise ValueError(f"the tensors end at byte {position} of {file_bytes}")
    return tensors


def _tensor(name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"tensor {name} has no dtype, shape or data_offsets") from None
    if isinstance(shape, list) and len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name}: {len(shape)} dimensions")
    if not isinstance(shape, list) or not all(
        type(one) is int and 0 <= one < _LARGEST_COUNT for one in (*shape, start, end)
    ):
        raise ValueError(f"tensor {name}: shape or data_offsets are no counts")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name}: dtype {str(dtype)[:20]!r} is not known")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if end - start != size:
        raise ValueError(f"tensor {name}: {end - start} bytes for {dtype} {shape}")
    return StoredTensor(name, dtype, tuple(shape), base + start, size)
