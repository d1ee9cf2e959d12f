"""`kvmesh ctl rollout`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.canary_options import canary_options
from services.cli.commands.arguments import StateOption, state_dir
from services.cli.errors import CliError
from services.cli.requests import command
from services.common.models import resolve_model

# Between two lines of progress: a drain, a start that loads a model, and what follows.
_SILENCE_S = 600.0


def rollout(
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="Also replace what is the only one of its kind; requests may fail.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="New version of a model, with a canary: PATH, or NAME=PATH where there are several.")
    ] = "",
    worker_flags: Annotated[
        str, typer.Option(help="New settings of its workers, with a canary, such as '--weight-dtype int8'.")
    ] = "",
    version: Annotated[str | None, typer.Option(help="Label of the new version; default: by the time of day.")] = None,
    share: Annotated[int | None, typer.Option(help="Percent of the requests that the canary gets; default: 5.")] = None,
    analysis_requests: Annotated[
        int | None, typer.Option(help="Attempts of the canary after which it is judged; default: 50.")
    ] = None,
    analysis_s: Annotated[
        float | None, typer.Option(help="Seconds after which it is judged by those it had; default: 300.")
    ] = None,
    quality_tolerance: Annotated[
        float | None, typer.Option(help="Nats a token by which reference texts may be less likely; default: 0.1.")
    ] = None,
    latency_tolerance: Annotated[
        float | None, typer.Option(help="How many times the stable version's TTFT and TPOT are allowed; default: 2.")
    ] = None,
    error_tolerance: Annotated[
        float | None, typer.Option(help="Percent of attempts that may fail beyond the stable version's; default: 1.")
    ] = None,
    state: StateOption = None,
) -> None:
    """Replace every process of the local mesh, one after another.

    With --model or --worker-flags: only the workers of a model, by a new version that is tried by a canary first.
    """
    of_canary = {
        "model": _found(model) if model else None,
        "worker_flags": worker_flags or None,
        "version": version,
        "share": share,
        "analysis_requests": analysis_requests,
        "analysis_s": analysis_s,
        "quality_tolerance": quality_tolerance,
        "latency_tolerance": latency_tolerance,
        "error_tolerance": error_tolerance,
    }
    given = {name: value for name, value in of_canary.items() if value is not None}
    if not given:
        command(state_dir(state), {"command": "rollout", "interrupt": interrupt}, typer.echo, _SILENCE_S)
        return
    if interrupt:
        raise CliError("--interrupt is for a rollout without --model and --worker-flags")
    options = canary_options(given)
    asked = {"command": "rollout", "canary": options.model_dump()}
    command(state_dir(state), asked, typer.echo, _SILENCE_S + options.analysis_s)


def _found(model: str) -> str:
    """With the artifact's whole path: the supervisor may be in another folder. Raises ConfigurationError."""
    source = resolve_model(model)
    return f"{source.name}={source.path}" if "=" in model else str(source.path)
