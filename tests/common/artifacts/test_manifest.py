"""A manifest says what an artifact is, and nothing else passes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.chunk_reader import CHUNK_BYTES
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.manifest import (
    make_manifest,
    manifest_bytes,
    manifest_path,
    parse_manifest,
    read_manifest,
    verify_artifact,
    write_manifest,
)

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "tokenizer.json": b"{}", "big.safetensors": b"x" * 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / "README.md").write_text("not part of it")
    (path / ".hidden.json").write_text("nor this")
    return path


def test_round_trip(folder: Path) -> None:
    assert read_manifest(folder) is None
    manifest = make_manifest(folder)
    assert sorted(manifest.files) == sorted(FILES)
    assert manifest.size == sum(map(len, FILES.values()))
    assert write_manifest(folder, manifest) == manifest_path(folder) == folder / "kvmesh-manifest.json"
    assert read_manifest(folder) == manifest
    assert make_manifest(folder) == manifest, "the manifest is not part of what it describes"
    verify_artifact(folder, manifest)
    assert sorted(one.name for one in folder.iterdir() if one.name.startswith(".")) == [".hidden.json"]


def test_a_gguf_file_has_its_manifest_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" * 10)
    write_manifest(path, make_manifest(path))
    assert (tmp_path / "a.gguf.kvmesh-manifest.json").is_file()
    manifest = read_manifest(path)
    assert manifest is not None
    assert list(manifest.files) == ["a.gguf"]


def test_the_digest_covers_names_sizes_and_contents(folder: Path) -> None:
    seen = {make_manifest(folder).digest}
    for change in (
        lambda: (folder / "config.json").write_bytes(b"[]"),
        lambda: (folder / "config.json").write_bytes(b"[] "),
        lambda: (folder / "config.json").rename(folder / "confif.json"),
        lambda: (folder / "tokenizer.json").unlink(),
    ):
        change()
        seen.add(make_manifest(folder).digest)
    assert len(seen) == 5


def test_what_differs_is_named(folder: Path) -> None:
    manifest = make_manifest(folder)
    weights = folder / "model.safetensors"
    for change, message in (
        (lambda: weights.write_bytes(b"w" * 999), "model.safetensors: 999 bytes, 1000 are expected"),
        (lambda: weights.write_bytes(b"w" * 999 + b"v"), "model.safetensors: chunk 0 .*differs"),
        (lambda: weights.unlink(), "model.safetensors: No such file"),
        (lambda: (folder / "more.safetensors").write_bytes(b"1"), "more.safetensors: not in the manifest"),
    ):
        change()
        with pytest.raises(InvalidArtifact, match=message):
            verify_artifact(folder, manifest)


def test_broken_manifests(folder: Path) -> None:
    good = json.loads(manifest_bytes(make_manifest(folder)))
    entry = good["files"]["config.json"]

    def with_file(name: str, **changes: Any) -> dict[str, Any]:
        return {**good, "files": {**good["files"], name: {**entry, **changes}}}

    for broken, message in (
        ({**good, "format": 2}, "format 2"),
        ({**good, "chunk_bytes": CHUNK_BYTES * 2}, "is not known"),
        ({**good, "files": {}}, "no files"),
        ({**good, "more": 1}, "more"),
        ({"format": 1}, "chunk_bytes"),
        (with_file("../config.json"), "no file name"),
        (with_file("/etc/passwd"), "no file name"),
        (with_file(".kvmesh-entry.json"), "no file name"),
        (with_file("kvmesh-manifest.json"), "no file name"),
        (with_file("config.json", size=-1), "do not make -1 bytes"),
        (with_file("config.json", size=CHUNK_BYTES + 1), "1 chunks do not make"),
        (with_file("config.json", chunks=["zz"]), "no digest"),
        (with_file("config.json", chunks=["00"]), "no digest"),
        (with_file("config.json", chunks=[" " + "00" * 31 + "0"]), "no digest"),
    ):
        with pytest.raises(InvalidArtifact, match=message):
            parse_manifest(json.dumps(broken).encode())
    for data in (b"", b"{", b"\xff\xfe", b"[]"):
        with pytest.raises(InvalidArtifact, match=r"kvmesh-manifest\.json"):
            parse_manifest(data)


def test_an_empty_folder_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(InvalidArtifact, match="no files of a model"):
        make_manifest(tmp_path)
