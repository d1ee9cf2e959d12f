"""The run of all tests: what fails once is run again and told; what fails twice, or cannot be run, fails the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import Phase, run
from tests.support.mesh import wait_for

GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert False\n"
# Fails where it has not been before.
ONCE = """
import pathlib
def test_once():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""
# Until it is interrupted; its process is in a file.
LONG = """
import os, pathlib, time
def test_long():
    name = pathlib.Path(__file__).stem.removeprefix("test_")
    pathlib.Path(__file__).with_name(name + ".pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    # Nothing of these tests needs plugins, which take longer to load than the tests.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def phase(folder: Path, name: str, text: str) -> Phase:
    (folder / f"test_{name}.py").write_text(text)
    return Phase(name, (f"test_{name}.py", "-q", "--import-mode=importlib"), caches=folder / "caches")


def test_what_fails_once_is_run_again_and_told(folder: Path) -> None:
    said: list[str] = []
    assert run([[phase(folder, "a", ONCE), phase(folder, "b", GOOD + ONCE)]], said.append) == 0
    assert said[-2:] == [f"passed only when run again: test_{name}.py::test_once" for name in "ab"]
    assert sum("failed at first" in line for line in said) == 2


def test_what_fails_twice_fails(folder: Path) -> None:
    said: list[str] = []
    assert run([[phase(folder, "a", GOOD)], [phase(folder, "b", BAD + ONCE)]], said.append) == 1
    assert said[-2:] == ["passed only when run again: test_b.py::test_once", "FAILED twice: test_b.py::test_bad"]


@pytest.mark.parametrize("broken", ["import nothing_of_this_name\n", "import os; os._exit(9)\n"])
def test_what_cannot_be_run_ends_all_at_once(folder: Path, broken: str) -> None:
    said: list[str] = []
    rows = [[phase(folder, "a", ONCE), phase(folder, "b", broken)], [phase(folder, "c", ONCE)]]
    assert run(rows, said.append) not in (0, 1)
    assert not (folder / "test_c.seen").exists(), "the next row is not begun"
    assert not any("failed at first" in line for line in said)


def test_nobody_is_waited_for_who_runs_beside_what_cannot_be_run(folder: Path) -> None:
    row = [phase(folder, "a", LONG), phase(folder, "b", "import nothing_of_this_name\n")]
    assert run([row], lambda _: None) not in (0, 1)


def test_what_is_told_to_end_ends_what_it_runs(folder: Path) -> None:
    rows = [[phase(folder, "one", LONG), phase(folder, "two", LONG)]]
    code = f"from pathlib import *; from tests.run import *; main({rows!r})"
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    pids = [folder / "one.pid", folder / "two.pid"]
    try:
        wait_for(lambda: all(pid.exists() and pid.read_text() for pid in pids), within_s=60, what="both run")
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) != 0
    finally:
        runner.kill()
        runner.wait()
    assert not any(Path("/proc", pid.read_text()).exists() for pid in pids)
