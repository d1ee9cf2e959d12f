"""`kvmesh ps` and `kvmesh logs`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.errors import CliError
from services.cli.listing import list_processes
from services.cli.logs import follow, last_lines


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state: StateOption = None,
) -> None:
    """List every process of the mesh; readiness is asked now."""
    processes = asyncio.run(list_processes(state_dir(state)))
    if as_json:
        typer.echo(json.dumps(processes, indent=1))
        return
    Console().print(_table(processes))


def logs(
    name: Annotated[str, typer.Argument(help="Process name as in `kvmesh ps`, or supervisor.")],
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of the end to print.")] = 200,
    state: StateOption = None,
) -> None:
    """Show a process's log."""
    path = state_dir(state).log(name)
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.log"))
        raise CliError(f"no log of {name!r}; there are: {', '.join(known) or 'none'}")
    for line in last_lines(path, lines):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if following:
        for text in follow(path):
            sys.stdout.write(text)
            sys.stdout.flush()


def _table(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("name", "release", "pid", "ready", "address", "metrics", "children"):
        table.add_column(column)
    for one in processes:
        children = " ".join(f"{child['role']}:{child['pid']}" for child in one["children"])
        ready = "[green]yes[/]" if one["ready"] else f"[red]{one.get('progress', 'no')}[/]"
        pid = str(one["pid"] or "-")
        table.add_row(one["name"], one["release"], pid, ready, one["address"], one["metrics"], children)
    return table
