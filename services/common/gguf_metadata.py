"""Metadata of a GGUF file, read straight from its header: no tensors, no dependency, tens of milliseconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from services.common.settings import ConfigurationError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_HEADER_BYTES = 24


class _Cursor:
    """Reads values one after another from the bytes of a file."""

    def __init__(self, data: mmap.mmap | bytes, position: int) -> None:
        self.data = data
        self.position = position

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> bytes:
        start = self.position + 8
        self.position = start + _U64.unpack_from(self.data, self.position)[0]
        return self.data[start : self.position]

    def value(self) -> Any:
        kind = self.scalar(4)
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        return self._array() if kind == _ARRAY else self.scalar(kind)

    def _array(self) -> list[Any]:
        kind, count = self.scalar(4), self.scalar(10)
        if kind == _STRING:
            return [self.string().decode("utf-8", "replace") for _ in range(count)]
        layout = _SCALARS[kind]
        values = struct.unpack_from(f"<{count}{layout[1]}", self.data, self.position)
        self.position += struct.calcsize(layout) * count
        return list(values)


def read_metadata(path: Path, prefixes: Collection[str] = ("",)) -> dict[str, Any]:
    """Values of the keys that begin with one of `prefixes`. Raises ConfigurationError naming a broken file."""
    return {key: value for key, (value, _) in _entries(path, prefixes).items()}


def read_raw_metadata(path: Path, prefixes: Collection[str]) -> dict[str, bytes]:
    """As `read_metadata`, with each value's encoded bytes (type tag included)."""
    return {key: raw for key, (_, raw) in _entries(path, prefixes).items()}


def _entries(path: Path, prefixes: Collection[str]) -> dict[str, tuple[Any, bytes]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF" or _U32.unpack_from(data, 4)[0] not in (2, 3):
                raise ConfigurationError(f"model file {path}: not GGUF version 2 or 3")
            cursor = _Cursor(data, _HEADER_BYTES)
            found: dict[str, tuple[Any, bytes]] = {}
            for _ in range(_U64.unpack_from(data, 16)[0]):
                key = cursor.string().decode("utf-8", "replace")
                start = cursor.position
                value = cursor.value()
                if any(key.startswith(prefix) for prefix in prefixes):
                    found[key] = (value, data[start : cursor.position])
            return found
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigurationError(f"model file {path}: {error}") from None
