"""Starts `bench/kv_peers.py`, one process for each peer, and collects its rows or the reason why there are none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.kv_measure import Row
from bench.kv_peers import ENVIRONMENTS, OURS

_SCRIPT = Path(__file__).parent / "kv_peers.py"
_DEADLINE_S = 120.0


@dataclass(slots=True)
class Peers:
    """Rows, and for each peer that could not be measured why."""

    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


async def measure_peers(venv: Path | None, cells: Sequence[tuple[int, int]], rounds: int, seconds: float) -> Peers:
    """Bare ucxx by this interpreter, the others by that of `venv`, one after the other."""
    peers = Peers()
    for name in ENVIRONMENTS:
        if name in OURS:
            await _measure(peers, Path(sys.executable), name, cells, rounds, seconds)
        elif venv is None:
            peers.left_out[name] = "no --peers"
        else:
            await _measure(peers, venv / "bin" / "python", name, cells, rounds, seconds)
    return peers


async def _measure(
    peers: Peers, interpreter: Path, name: str, cells: Sequence[tuple[int, int]], rounds: int, seconds: float
) -> None:
    task = json.dumps({"cells": cells, "rounds": rounds, "seconds": seconds})
    process = await asyncio.create_subprocess_exec(
        interpreter,
        _SCRIPT,
        name,
        task,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENTS[name],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        peers.left_out[name] = f"not done after {_DEADLINE_S:g} s"
        return
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode().splitlines()
    if process.returncode or not lines:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        peers.left_out[name] = last[:200]
        return
    peers.rows += json.loads(lines[-1])
