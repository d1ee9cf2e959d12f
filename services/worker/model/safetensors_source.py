"""Tensors of a Hugging Face folder: one safetensors file, or shards listed in an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.model.errors import InvalidWeights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsSource:
    """A TensorSource over all files of a folder, which stay mapped while it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidWeights when there is no weight file, one cannot be read, or a name occurs twice."""
        self.files = weight_files(folder)
        self._handles: dict[str, Any] = {}
        for path in self.files:
            try:
                handle: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidWeights(f"{path.name} is not a readable safetensors file: {error}") from error
            for name in handle.keys():  # noqa: SIM118
                if name in self._handles:
                    raise InvalidWeights(f"tensor {name} occurs in two files")
                self._handles[name] = handle

    def names(self) -> set[str]:
        return set(self._handles)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in a fixed order. Raises InvalidWeights."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise InvalidWeights(f"{folder.name} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InvalidWeights(f"{INDEX_FILE} cannot be read: {error}") from error
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise InvalidWeights(f"{INDEX_FILE} names {name}, which is not in the folder")
    return [folder / name for name in names]
