"""What gateways log of the moves of a drain: each phase of it, and where the time of its gap went."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

_EVENTS = ("moved", "rescued", "move_failed", "move_refused", "worker_failed")
_KEPT = (
    "event",
    "reason",
    "error",
    "phase",
    "target_id",
    "worker_id",
    "known_tokens",
    "pause_s",
    "wait_s",
    "ask_s",
    "admit_s",
    "prepare_s",
    "pull_s",
    "compute_s",
    "catch_up_s",
    "rounds",
    "align_s",
    "left_s",
    "first_token_s",
)


def moves_in(logs: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of moves and rescues, in order, with the fields that tell of them."""
    found: list[dict[str, Any]] = []
    for path in logs:
        for line in path.read_text().splitlines():
            told = json.loads(line) if line.startswith("{") else {}
            if told.get("event") in _EVENTS:
                found.append({name: told[name] for name in _KEPT if name in told})
    return found


def moves_table(moves: Iterable[dict[str, Any]]) -> Table:
    """One row for each move or failure. Times in ms; those of the gap, which the client sees, come last."""
    table = Table(title="Moves, as their gateways log them: ms")
    phases = "wait", "ask", "admit", "prepare", "pull", "compute", "catch_up", "rounds", "align", "left", "first_token"
    for column in ("what", "to", "known", *phases, "pause"):
        table.add_column(column, justify="right")
    for move in moves:
        why = ":".join(str(move[name]) for name in ("event", "reason", "error", "phase") if move.get(name))
        times = (_told(move, name) for name in (*phases, "pause"))
        table.add_row(why, str(move.get("worker_id") or move.get("target_id", "")), _told(move, "known_tokens"), *times)
    return table


def _told(move: dict[str, Any], name: str) -> str:
    seconds = move.get(f"{name}_s")
    return str(move.get(name, "")) if seconds is None else f"{1e3 * seconds:.0f}"
