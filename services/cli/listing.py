"""What `kvmesh ps` shows: the supervisor's snapshot, each process's own children, and readiness asked now."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from services.cli.load_progress import load_progress
from services.cli.plan import ProcessSpec
from services.cli.probes import are_ready
from services.cli.process_state import process_state
from services.cli.state import StateDir
from services.common.settings import ConfigurationError


async def list_processes(state: StateDir) -> list[dict[str, Any]]:
    """Entries in the order of starting. Raises NotRunningError."""
    entries: list[dict[str, Any]] = state.snapshot()["processes"]
    ready = await are_ready([_spec(entry) for entry in entries if entry["pid"]], redis_password(state))
    starting = [one for one in entries if one["kind"] == "worker" and one["pid"] and not ready[one["name"]]]
    told = await asyncio.gather(*(load_progress(entry["metrics"]) for entry in starting))
    progress = {entry["name"]: line for entry, line in zip(starting, told, strict=True) if line}
    return [
        {
            **{key: entry[key] for key in ("name", "kind", "pid", "address", "metrics", "restarts", "silences")},
            "ready": ready.get(entry["name"], False),
            **({"progress": progress[entry["name"]]} if entry["name"] in progress else {}),
            "release": _told(state.ready_file(entry["name"]), entry["pid"]).get("release", ""),
            "children": _children(_told(state.ready_file(entry["name"]), entry["pid"])),
        }
        for entry in entries
    ]


def redis_password(state: StateDir) -> str:
    """Password of the mesh's own Valkey; empty when it has none."""
    try:
        url = state.redis_url_file.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{state.redis_url_file}: {error.strerror}") from None
    return url.partition("://")[2].rpartition("@")[0].partition(":")[2]


def _spec(entry: dict[str, Any]) -> ProcessSpec:
    return ProcessSpec(entry["name"], entry["kind"], (), entry["address"], entry["metrics"], entry["admin"])


def _told(ready_file: Path, pid: int | None) -> dict[str, Any]:
    """What the process wrote into its ready file; a stale file is another process's."""
    try:
        told: dict[str, Any] = json.loads(ready_file.read_text())
    except (OSError, ValueError):
        return {}
    return told if told.get("pid") == pid else {}


def _children(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Its children that live."""
    return [
        {"role": child["role"], "pid": child["pid"]} for child in told.get("children", []) if is_alive(child["pid"])
    ]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    return process_state(pid) not in ("", "Z", "X")
