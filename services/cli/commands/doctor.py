"""`kvmesh doctor`: what this machine has and what it lacks."""

from __future__ import annotations

import typer
from rich.console import Console

from services.cli.checks import run_checks


def doctor() -> None:
    """Check that a mesh can run here; the exit status is 1 when it cannot."""
    console = Console(highlight=False)
    failed = False
    for check in run_checks():
        failed |= not check.passed
        mark = "[green]ok  [/]" if check.passed else "[red]FAIL[/]"
        console.print(f"{mark} {check.name:<12}", end=" ")
        console.print(check.detail, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
