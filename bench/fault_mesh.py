"""A local mesh for benches that break it: started and ended by `kvmesh`, looked at without starting anything.

`Books` is what must be zero once nobody asks for anything: whatever is not is a leak.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.local_mesh import started
from services.cli.listing import list_processes
from services.cli.state import StateDir

_SCRAPE_TIMEOUT_S = 5.0
_POLL_S = 0.2
# By kind of process, what is zero when nobody asks for anything. Kept answers are not: they have a time to live.
IDLE_ZEROS: dict[str, tuple[str, ...]] = {
    "worker": (
        "kvmesh_worker_running_requests",
        "kvmesh_worker_waiting_requests",
        "kvmesh_worker_held_requests",
        "kvmesh_worker_adapter_waiting_requests",
        "kvmesh_worker_referenced_blocks",
        "kvmesh_worker_pins",
        "kvmesh_mover_open_leases",
        "kvmesh_mover_running_pulls",
    ),
    "gateway": (
        "kvmesh_gateway_inflight_requests",
        "kvmesh_gateway_waiting_requests",
        "kvmesh_gateway_cold_requests",
        "kvmesh_gateway_open_attempts",
        "kvmesh_gateway_open_asks",
        "kvmesh_gateway_open_records",
    ),
    "router": ("kvmesh_router_pending_attempts",),
    "kvstore": ("kvmesh_kvstore_open_leases",),
}
_POOL = ("kvmesh_worker_free_blocks", "kvmesh_worker_cached_blocks", "kvmesh_worker_referenced_blocks")
_KEPT = "kvmesh_worker_kept_requests"


@dataclass(frozen=True, slots=True)
class Books:
    """What each process still holds. held: what is not zero, by process and metric. silent: who did not answer.

    pools: blocks of each ready worker's pool, free, cached and referenced together. kept: answers kept for repeats.
    """

    held: Mapping[str, float]
    pools: Mapping[str, float]
    kept: float
    silent: tuple[str, ...]

    @property
    def is_clear(self) -> bool:
        """Whether everybody answered and holds nothing."""
        return not self.held and not self.silent


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """A running mesh below `folder`. port: of its HTTP API."""

    folder: Path
    port: int

    async def processes(self) -> list[dict[str, Any]]:
        """What `kvmesh ps` tells."""
        return await list_processes(StateDir(self.folder))

    async def ready(self, kind: str) -> list[dict[str, Any]]:
        """Those of a kind that are ready now."""
        return [one for one in await self.processes() if one["kind"] == kind and one["ready"]]

    async def wait_ready(self, within_s: float) -> None:
        """Until every process is. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while not all(one["ready"] for one in await self.processes()):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def books(self) -> Books:
        """As they are now."""
        held: dict[str, float] = {}
        pools: dict[str, float] = {}
        silent, kept = [], 0.0
        for one in await self.processes():
            if one["kind"] not in IDLE_ZEROS:
                continue
            try:
                samples = await asyncio.to_thread(scrape, one["metrics"])
            except OSError:
                silent.append(one["name"])
                continue
            held |= {
                f"{one['name']} {name}": value for name in IDLE_ZEROS[one["kind"]] if (value := total(samples, name))
            }
            if one["kind"] == "worker" and one["ready"]:
                pools[one["name"]] = sum(total(samples, name) for name in _POOL)
                kept += total(samples, _KEPT)
        return Books(held, pools, kept, tuple(silent))

    async def settled(self, within_s: float) -> Books:
        """The books once they are clear, or as they are when the time is over."""
        ends_s = time.monotonic() + within_s
        while not (books := await self.books()).is_clear and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return books

    async def total(self, kind: str, name: str, **labels: str) -> float:
        """Of a metric over all processes of a kind that answer."""
        found = 0.0
        for one in await self.processes():
            if one["kind"] == kind:
                try:
                    found += total(await asyncio.to_thread(scrape, one["metrics"]), name, **labels)
                except OSError:
                    continue
        return found


@contextmanager
def local_mesh(options: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[LocalMesh]:
    """`kvmesh up` with these options until the end of the block. Raises RuntimeError."""
    with started(options, environment or {}) as (folder, port, _):
        yield LocalMesh(folder, port)


def scrape(address: str) -> dict[str, float]:
    """Samples of the Prometheus page at "host:port", by name with labels. Raises OSError."""
    with urlopen(f"http://{address}/metrics", timeout=_SCRAPE_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the series of one metric that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for series, value in samples.items()
        if re.split(r"[{ ]", series)[0] == name and all(label in series for label in wanted)
    )


def dumped(value: Any) -> str:
    """As a cell of a table."""
    return json.dumps(value, indent=1) if isinstance(value, dict) else str(value)
