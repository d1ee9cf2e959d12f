"""The header of a GGUF file: metadata read straight from the bytes, in tens of milliseconds and without a dependency.

The reader of the `gguf` package makes an object of every token of the vocabulary, which takes seconds. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
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
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# What a file that is none, or is cut short, raises while it is read.
GGUF_ERRORS = (OSError, ValueError, OverflowError, RecursionError, struct.error)


class GgufReader:
    """Reads a file's header front to back: counts, metadata entries, then (for who wants them) tensor entries.

    Everything raises one of GGUF_ERRORS when the bytes are no GGUF.
    """

    def __init__(self, data: mmap.mmap) -> None:
        """Reads the counts. data: the whole file."""
        if data[:4] != _MAGIC:
            raise ValueError("no GGUF magic")
        self.data = data
        self.position = len(_MAGIC)
        version = self.unpack("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, only {_VERSIONS} are known")
        self.num_tensors: int = self.unpack("<Q")
        self.num_entries: int = self.unpack("<Q")

    def unpack(self, layout: str) -> Any:
        """One scalar in a struct format."""
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def text(self) -> str:
        """A string."""
        start = self.position + 8
        self.position = start + self.unpack("<Q")
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, *, with_strings: bool) -> Any:
        """A tagged value; without strings an array of them is skipped and None."""
        kind = self.unpack("<I")
        if kind == _STRING:
            return self.text()
        return self._array(with_strings) if kind == _ARRAY else self.unpack(_scalar_layout(kind))

    def _array(self, with_strings: bool) -> list[Any] | None:
        kind, count = self.unpack("<I"), self.unpack("<Q")
        if kind == _STRING:
            strings = [self._text_or_none(with_strings) for _ in range(count)]
            return strings if with_strings else None
        if kind == _ARRAY:
            return [self._array(with_strings) for _ in range(count)]
        layout = f"<{count}{_scalar_layout(kind)[1]}"
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return list(values)

    def _text_or_none(self, wanted: bool) -> str | None:
        if wanted:
            return self.text()
        length = self.unpack("<Q")
        self.position += length
        return None


def read_metadata(path: Path, prefixes: Collection[str] = ("",)) -> dict[str, Any]:
    """Values of the keys that begin with one of `prefixes`. Raises ConfigurationError naming a broken file."""
    return {key: value for key, (value, _) in _entries(path, prefixes, with_strings=True).items()}


def read_raw_metadata(path: Path, prefixes: Collection[str]) -> dict[str, bytes]:
    """As `read_metadata`, but each value's encoded bytes (type tag included)."""
    return {key: raw for key, (_, raw) in _entries(path, prefixes, with_strings=False).items()}


def _entries(path: Path, prefixes: Collection[str], *, with_strings: bool) -> dict[str, tuple[Any, bytes]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = GgufReader(data)
            found: dict[str, tuple[Any, bytes]] = {}
            for _ in range(reader.num_entries):
                key = reader.text()
                start, wanted = reader.position, key.startswith(tuple(prefixes))
                value = reader.value(with_strings=wanted and with_strings)
                if wanted:
                    found[key] = (value, data[start : reader.position])
            return found
    except GGUF_ERRORS as error:
        raise ConfigurationError(f"model file {path}: {error}") from None


def _scalar_layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"values of type {kind} are not known")
    return _SCALARS[kind]
