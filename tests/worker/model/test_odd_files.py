"""Folders of pipes, devices, loops and headers that lie: each is refused at once, in one line."""

from __future__ import annotations

import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench.family_models import SHAPE
from services.common.artifacts.manifest import CHUNK_BYTES, MANIFEST_NAME
from services.worker.model.errors import ModelError
from services.worker.model.model_files import open_model
from services.worker.model.safetensors_source import INDEX_FILE, SINGLE_FILE

NAME = "model.embed_tokens.weight"
DEEP = b"[" * 200_000
FILES = ("config.json", SINGLE_FILE, INDEX_FILE, MANIFEST_NAME)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": "llama"}))
    save_file({NAME: torch.zeros(4, 6)}, tmp_path / SINGLE_FILE)
    open_and_read(tmp_path)
    return tmp_path


def open_and_read(folder: Path) -> None:
    """What loading does before it asks for tensors by name, and a look at each."""
    source, _ = open_model(folder).read()
    for name in source.names():
        source.read(name)


def check_refused(folder: Path) -> None:
    with pytest.raises(ModelError) as refused:
        open_and_read(folder)
    text = str(refused.value)
    assert text.isprintable()
    assert 0 < len(text) < 600


@pytest.mark.parametrize("kind", ["pipe", "loop", "endless", "folder", "deep", "binary"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(name)
        case "endless":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "deep":
            path.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP if name == SINGLE_FILE else DEEP)
        case "binary":
            path.write_bytes(b"\xff\xfe\x00" * 9)
    check_refused(folder)


@pytest.mark.parametrize(
    "placed", [None, [], {}, {"a": 5}, {"a": ""}, {"a": "x" * 5000}, {"a": "a\0b"}, {"a": "../x"}, {"a": "\ud800"}]
)
def test_an_index_that_names_no_file(folder: Path, placed: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": placed}))
    check_refused(folder)


@pytest.mark.parametrize(
    "files",
    [
        {"a": {"size": -1, "chunks": []}},
        {"a": {"size": 2**62, "chunks": []}},
        {"../a": {"size": 0, "chunks": []}},
        {"..": {"size": 0, "chunks": []}},
        {"a\0": {"size": 0, "chunks": []}},
        {"\ud800": {"size": 0, "chunks": []}},
        {"x" * 4000: {"size": 0, "chunks": []}},
        {"a": {"size": 1, "chunks": ["z" * 64]}},
        {"a": {"size": 1, "chunks": ["é" * 64]}},
    ],
)
def test_a_manifest_that_cannot_be(folder: Path, files: Any) -> None:
    (folder / MANIFEST_NAME).write_text(json.dumps({"format": 1, "chunk_bytes": CHUNK_BYTES, "files": files}))
    check_refused(folder)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 5, 2**70, 1e9, "x", "a\nb", "\ud800", [], {}, [-1], [4, -6], [0, 2**70], [2**64, 2**64]),
    *(["a"], ["F32"], [0, 0], [1e9], [True, True], [None, 0], [2**62] * 400_000, {"a": 1}),
)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_fields_of_a_safetensors_header(folder: Path, field: str) -> None:
    for value in ODD:
        rewrite(folder, {NAME: {field: value}})
        check_refused(folder)


def test_names_and_empty_tensors_of_a_safetensors_header(folder: Path) -> None:
    for name, shape in itertools.product(("a\nb", "\ud800", "a" * 3000), ([2**64, 0], [0, 2**48], [0] * 9)):
        rewrite(folder, {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
        check_refused(folder)


def rewrite(folder: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Write the weights again, fields of their header changed or added."""
    header = {NAME: {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}}
    for name, fields in changes.items():
        header[name] = {**header.get(name, {}), **fields}
    data = json.dumps(header).encode()
    (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", len(data)) + data + bytes(96))
