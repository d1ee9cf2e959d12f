"""`kvmesh ctl rollout`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.requests import command

# Between two lines of progress: a drain, a start that loads a model, and what follows.
_SILENCE_S = 600.0


def rollout(
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="Also replace what is the only one of its kind; requests may fail.")
    ] = False,
    state: StateOption = None,
) -> None:
    """Replace every kvstore, router, worker and gateway of the local mesh, one after another."""
    command(state_dir(state), {"command": "rollout", "interrupt": interrupt}, typer.echo, _SILENCE_S)
