"""`kvmesh models`: sealing, verifying and the local cache, as a person types them."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.errors import CliError
from services.cli.main import app
from services.common.artifacts.cache import ModelCache
from services.common.artifacts.manifest import manifest_path, read_manifest

from .test_commands import kvmesh


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [1000], "data_offsets": [0, 1000]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(1000))
    return path


def models(*arguments: str, cache: Path | None = None) -> Result:
    where = ("--cache-dir", str(cache)) if cache else ()
    return CliRunner().invoke(app, ["models", *arguments, *where])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_seal_and_verify(folder: Path) -> None:
    before = models("verify", str(folder))
    assert (before.exit_code, "not sealed: its headers are well" in before.output) == (0, True)
    sealed = models("seal", str(folder))
    manifest = read_manifest(folder)
    assert manifest is not None
    assert sealed.output.startswith(f"{manifest_path(folder)}: 2 files, ")
    assert manifest.digest in sealed.output
    good = models("verify", str(folder))
    assert (good.exit_code, f"tiny: good, 2 files, {manifest.size} bytes" in good.output) == (0, True)
    damage(folder / "model.safetensors")
    bad = models("verify", str(folder))
    assert (bad.exit_code, "model.safetensors: chunk 0" in bad.stderr) == (1, True)


def test_a_damaged_header_is_found_without_a_manifest(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = models("verify", str(folder))
    assert (result.exit_code, "tensor w ends at byte" in result.stderr) == (1, True)


def test_the_cache(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    models("seal", str(folder))
    added = models("add", f"mine={folder}", cache=cache)
    assert (added.exit_code, added.output[:12]) == (0, "mine: added,")
    assert "already there" in models("add", str(folder), cache=cache).output
    rows = json.loads(models("list", "--json", cache=cache).output)
    assert [row["model"] for row in rows] == ["smollm2-135m", "mine"]
    assert rows[1]["digest"] in added.output
    assert rows[1]["in_use"] is False
    assert "mine: good" in models("verify", cache=cache).output
    lease = ModelCache(cache, 10**9).lease(rows[1]["digest"])
    assert lease is not None
    in_use = models("remove", "mine", cache=cache)
    assert (in_use.exit_code, in_use.stderr) == (1, "mine: in use\n")
    damage(lease.path / "model.safetensors")
    assert models("verify", rows[1]["digest"][:5], cache=cache).exit_code == 1
    lease.close()
    assert models("remove", rows[1]["digest"][:6], cache=cache).output == "mine: removed\n"
    assert isinstance(models("remove", "mine", cache=cache).exception, CliError)
    models("add", str(folder), cache=cache)
    assert models("evict", cache=cache).output == "1 removed, 0 bytes left\n"


def test_a_download_s_own_digest_is_believed_only_when_it_fits(folder: Path, tmp_path: Path) -> None:
    weights, blobs = folder / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    assert "1 files have the SHA-256" in models("seal", str(folder)).output
    manifest_path(folder).unlink()
    damage(blob)
    result = models("seal", str(folder))
    assert "model.safetensors: its contents do not have the SHA-256" in str(result.exception)
    assert not manifest_path(folder).exists()


def test_errors_are_one_line(tmp_path: Path) -> None:
    for arguments, environment, named in (
        (("models", "verify"), {}, "no local model cache"),
        (("models", "verify"), {"KVMESH_MODEL_CACHE_BYTES": "many"}, "model_cache_bytes='many'"),
        (("models", "seal", "/no/such"), {}, "/no/such"),
    ):
        result = kvmesh(*arguments, state=tmp_path, **environment)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert named in result.stderr
    environment = {"KVMESH_WORKER_MODEL_CACHE_DIR": str(tmp_path / "cache")}
    assert kvmesh("models", "evict", state=tmp_path, **environment).stdout == "0 removed, 0 bytes left\n"
