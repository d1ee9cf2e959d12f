"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.errors import NotRunningError
from services.cli.state import STATE_VARIABLE, StateDir, state_path
from services.cli.supervisor import reachable

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help=f"State directory of the mesh; default: ${STATE_VARIABLE}, else .kvmesh here."),
]
UrlOption = Annotated[
    str, typer.Option("--url", help="Root of the HTTP API; default: the mesh of the state directory.")
]


def state_dir(given: Path | None) -> StateDir:
    """The state directory that a command means."""
    return StateDir(state_path(given))


def api_url(url: str, state: Path | None) -> str:
    """`--url`, else that of the running mesh, else the default port."""
    if url:
        return url.rstrip("/").removesuffix("/v1")
    try:
        return f"http://{reachable(state_dir(state).snapshot()['http'])}"
    except NotRunningError:
        return "http://127.0.0.1:8080"
