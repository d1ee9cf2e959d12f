"""The state directory, its lock, and log files that stay bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from services.cli.errors import AlreadyRunningError, NotRunningError
from services.cli.logs import follow, last_lines, open_log, rotate
from services.cli.state import StateDir, state_path


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "state")
    made.create()
    return made


def test_everything_is_private(state: StateDir) -> None:
    state.publish({})
    for folder in (state.root, state.logs, state.run):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in (state.secret_file, state.admin_key_file, state.admin_keys_file, state.root / "mesh.json"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_the_secret_survives(state: StateDir) -> None:
    before = state.secret_file.read_text()
    state.create()
    assert state.secret_file.read_text() == before


def test_one_supervisor_at_a_time(state: StateDir) -> None:
    with state.locked():
        assert state.supervisor_pid() == os.getpid()
        with pytest.raises(AlreadyRunningError, match=f"pid {os.getpid()}"), state.locked():
            pass
    assert state.supervisor_pid() == 0


def test_a_snapshot_counts_only_while_its_supervisor_runs(state: StateDir) -> None:
    with state.locked():
        with pytest.raises(NotRunningError, match="only just starting"):
            state.snapshot()
        state.publish({"phase": "ready"})
        assert state.snapshot() == {"phase": "ready"}
    with pytest.raises(NotRunningError, match="no mesh is running"):
        state.snapshot()


def test_where_the_state_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVMESH_STATE", raising=False)
    assert state_path(None) == tmp_path / ".kvmesh"
    monkeypatch.setenv("KVMESH_STATE", "/elsewhere")
    assert state_path(None) == Path("/elsewhere")
    assert state_path(Path("/given")) == Path("/given")


def test_a_log_is_emptied_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    writer = open_log(path)
    os.write(writer, b"x" * 100)
    assert not rotate(path, max_bytes=100)
    os.write(writer, b"y")
    assert rotate(path, max_bytes=100)
    os.write(writer, b"after\n")
    os.close(writer)
    assert path.read_text() == "after\n"
    assert (tmp_path / "one.log.1").read_text() == "x" * 100 + "y"
    assert not rotate(tmp_path / "missing.log")


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    assert last_lines(path, 3) == []
    path.write_text("".join(f"{number}\n" for number in range(10)))
    assert last_lines(path, 3) == ["7", "8", "9"]


def test_following_goes_on_after_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    writer = open_log(path)
    os.write(writer, b"old\n")
    text = follow(path)
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(next(text) for _ in range(2)), daemon=True)
    reader.start()
    while not seen:
        os.write(writer, b"first, and long enough to be beyond the second\n")
        reader.join(0.3)
    rotate(path, max_bytes=1)
    while reader.is_alive():
        os.write(writer, b"second\n")
        reader.join(0.3)
    os.close(writer)
    assert "first" in seen[0]
    assert "second" in seen[-1] or "first" in seen[-1]
