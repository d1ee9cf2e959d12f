"""Configuration: precedence of its sources and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from services.common.models import resolve_model
from services.common.security import MeshSecret, create_secret_file, load_mesh_secret
from services.common.settings import ConfigurationError, ServiceSettings, load_settings


class ProbeSettings(ServiceSettings):
    service: ClassVar[str] = "probe"
    width: int = 1


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVMESH_CONFIG", "REDIS_URL", "KVMESH_REDIS_URL", "KVMESH_PROBE_WIDTH", "KVMESH_WIDTH"):
        monkeypatch.delenv(name, raising=False)


def test_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[common]\nredis_url = 'redis://file'\n[probe]\nwidth = 2\n")
    monkeypatch.setenv("REDIS_URL", "redis://standard")
    assert load_settings(ProbeSettings, []).redis_url == "redis://standard"
    monkeypatch.setenv("KVMESH_CONFIG", str(file))
    assert load_settings(ProbeSettings, []).redis_url == "redis://file"
    assert load_settings(ProbeSettings, []).width == 2
    monkeypatch.setenv("KVMESH_WIDTH", "3")
    assert load_settings(ProbeSettings, []).width == 3
    monkeypatch.setenv("KVMESH_PROBE_WIDTH", "4")
    assert load_settings(ProbeSettings, []).width == 4
    assert load_settings(ProbeSettings, ["--width", "5"]).width == 5


def test_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_PROBE_WIDTH", "wide")
    with pytest.raises(ConfigurationError, match="probe: width='wide'"):
        load_settings(ProbeSettings, [])


def test_unknown_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_PROBE_WIDHT", "4")
    with pytest.raises(ConfigurationError, match="KVMESH_PROBE_WIDHT"):
        load_settings(ProbeSettings, [])


def test_unknown_key_of_the_file_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[probe]\nheight = 2\n")
    monkeypatch.setenv("KVMESH_CONFIG", str(file))
    with pytest.raises(ConfigurationError, match="height"):
        load_settings(ProbeSettings, [])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"x = [", "Invalid value"),
        (b"a = \xff", "utf-8"),
        (b"probe = 5", "probe is not a table"),
        (b"worker = 5", "worker is not a table"),
        (b"[wroker]\nwidth = 2", "wroker"),
        (b"width = 2", "width"),
    ],
)
def test_a_broken_file_stops_the_start_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, named: str
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_bytes(content)
    monkeypatch.setenv("KVMESH_CONFIG", str(file))
    with pytest.raises(ConfigurationError, match=named) as caught:
        load_settings(ProbeSettings, [])
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flags", [["--nonsense", "1"], ["--listen"]])
def test_a_wrong_flag_stops_the_start_with_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=flags[0]) as raised:
        load_settings(ProbeSettings, flags)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr() == ("", "")


def test_settings_are_frozen_and_hide_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_MESH_SECRET", "a secret of sixteen")
    settings = load_settings(ProbeSettings, [])
    assert "sixteen" not in repr(settings)
    assert "sixteen" not in repr(load_mesh_secret(settings))
    with pytest.raises(ValueError, match="frozen"):
        settings.width = 7  # type: ignore[misc]


def test_secret_file_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    create_secret_file(path)
    first = path.read_text()
    create_secret_file(path)
    assert path.read_text() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_mesh_secret(ProbeSettings(mesh_secret_file=path)).block_key == MeshSecret(first.strip()).block_key


def test_missing_and_short_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mesh_secret"):
        load_mesh_secret(ProbeSettings())
    with pytest.raises(ConfigurationError, match="nowhere"):
        load_mesh_secret(ProbeSettings(mesh_secret_file=tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="shorter"):
        MeshSecret("short")


def test_keys_differ_by_purpose() -> None:
    secret = MeshSecret("a secret of sixteen")
    assert len({secret.block_key, secret.pull_key, bytes.fromhex(secret.rpc_token)}) == 3


def test_model_names(tmp_path: Path) -> None:
    default = resolve_model("smollm2-135m")
    assert default.is_gguf
    assert default.path.is_file()
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)).name == "tiny"
    assert resolve_model(f"public={folder}").name == "public"
    with pytest.raises(ConfigurationError, match="absent"):
        resolve_model(str(tmp_path / "absent"))
