"""What commands print for people: nothing is cut off, nothing lands in another's column, help names the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.commands.ctl import show_rows
from services.cli.commands.up import _welcome, up
from services.cli.main import app
from services.cli.options import MeshOptions
from services.cli.state import STATE_VARIABLE, StateDir, state_path

LONG = "a-worker-with-a-very-long-name-" * 5


def test_tables_show_every_value_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"worker_id": LONG, "indexed_blocks": 7, "ready": True}, {"worker_id": "w", "ready": False}], False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["worker_id", "indexed_blocks", "ready"]
    assert [line.split() for line in lines] == [[LONG, "7", "True"], ["w", "-", "False"]]
    assert {line.rindex(line.split()[-1]) for line in lines} == {head.index("ready")}


def test_help_of_up_shows_every_default() -> None:
    hints = get_type_hints(up, include_extras=True)
    helps = {name: str(hints[name].__metadata__[0].help) for name in hints if name not in ("detach", "return")}
    shown = " ".join(CliRunner().invoke(app, ["up", "--help"]).output.replace("│", " ").split())
    for name, text in helps.items():
        assert "default: " in text, name
        assert text in shown


def test_the_commands_to_go_on_with_name_the_state_directory_where_they_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "usual"))
    _welcome(Console(), MeshOptions(), StateDir(state_path(None)), 1.0)
    assert "--state" not in capsys.readouterr().out
    _welcome(Console(), MeshOptions(), StateDir(tmp_path / "other"), 1.0)
    assert f"each with --state {tmp_path / 'other'}" in capsys.readouterr().out.replace("\n", "")
