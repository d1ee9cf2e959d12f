"""How far a starting worker is with its model, read from its metrics, which need no secret."""

from __future__ import annotations

import asyncio
import re

from services.cli.probes import PROBE_TIMEOUT_S, http_exchange

_SAMPLE = re.compile(r'^kvmesh_worker_load_(done|total)_bytes\{[^}]*phase="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


async def load_progress(metrics_address: str) -> str:
    """Such as "loading 40 %"; empty when nothing is on its way or the worker does not answer."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, body = await http_exchange(metrics_address, "/metrics")
    except (OSError, TimeoutError, ValueError):
        return ""
    return progress_of(body)


def progress_of(metrics: str) -> str:
    """The same from a page of metrics."""
    found = {name: (phase, float(value)) for name, phase, value in _SAMPLE.findall(metrics)}
    if len(found) != 2:
        return ""
    (phase, done), (_, total) = found["done"], found["total"]
    return f"{phase} {int(100 * done / total)} %" if total else phase
