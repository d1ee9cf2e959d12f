"""`python -m bench.kv`: how fast KV blocks move between two processes of this host, over every transport.

Blocks of 256 KiB, 1 MiB and 4 MiB in pulls of 1, 8 and 32 blocks, in RAM at the holder: GB/s, p50 and p99 of a pull,
CPU seconds of both processes for each GB, every block verified as it arrives; the rate without verification stands
beside it. memcpy and a plain blocking TCP socket of the same run are the measure. Paths take turns, round by round, and
the median round counts. Writes bench/results/kv.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kv_holder import BLOCK_SIZES, SECRET
from bench.kv_paths import Buffers, Cell, Fetch, memcpy_path, socket_path, transport_path
from services.common.telemetry import configure_logging
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import PeerAddress, Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor, ucx_importable

IN_FLIGHT = (1, 8, 32)
MIN_CALLS = 3
IDLE_S = 5.0
MEMCPY, TCP = "memcpy", "tcp socket"
RESULTS = Path(__file__).parent / "results" / "kv.json"
MakePath = Callable[[Cell, Buffers], Fetch]


@dataclass(slots=True)
class Samples:
    """Of one cell on one path: a rate and CPU time for each round, and the time of every call."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    calls_us: list[float] = field(default_factory=list)

    def quantile_us(self, share: float) -> float:
        """Time that this share of the calls did not exceed."""
        ordered = sorted(self.calls_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Measured = dict[tuple[str, Cell], Samples]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each cell in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", default="", help="only these, separated by commas: shm, ucx, grpc")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    configure_logging("bench", "kv", "WARNING")
    with holder() as (process, addresses):
        run = Run(process.pid, addresses, {name for name in arguments.paths.split(",") if name})
        asyncio.run(run.measure(arguments.rounds, arguments.seconds))
    show(run)
    write(run, arguments.output)
    sys.stdout.flush()
    # UCX's own teardown at interpreter exit can hang.
    os._exit(0)


class Run:
    """One run against one holder."""

    def __init__(self, holder_pid: int, addresses: dict[str, Any], only: set[str]) -> None:
        self.measured: Measured = {}
        self.idle: dict[str, float] = {}
        self.load = os.getloadavg()[0]
        self._holder_pid = holder_pid
        self._addresses = addresses
        self._only = only

    @property
    def paths(self) -> list[str]:
        """Names of what was measured, ceilings first."""
        return list(dict.fromkeys(name for name, _ in self.measured))

    async def measure(self, rounds: int, seconds: float) -> None:
        """Every path and cell, `rounds` times; then an idle while."""
        peer = PeerAddress(self._addresses["pull_address"], self._addresses["grpc_address"])
        transports = [transport for transport in _transports() if not self._only or transport.name in self._only]
        with socket.create_connection(("127.0.0.1", self._addresses["port"])) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            paths: dict[str, MakePath] = {
                MEMCPY: memcpy_path,
                TCP: lambda cell, target: socket_path(cell, target, connection),
            }
            for transport in transports:
                paths[transport.name] = _path_of(transport, peer)
            for block_bytes in BLOCK_SIZES:
                await self._measure_size(paths, block_bytes, rounds, seconds)
        await self._measure_idle()
        for transport in transports:
            await transport.close()

    async def _measure_size(self, paths: dict[str, MakePath], block_bytes: int, rounds: int, seconds: float) -> None:
        target = Buffers(block_bytes)
        fetches = {
            (name, cell): make(cell, target)
            for name, make in paths.items()
            for cell in (Cell(block_bytes, count, verified) for count in IN_FLIGHT for verified in (True, False))
            if not cell.verified or name not in (MEMCPY, TCP)
        }
        for fetch in fetches.values():
            await fetch(0)
        for _ in range(rounds):
            for key, fetch in fetches.items():
                await self._measure_round(key[1], fetch, self.measured.setdefault(key, Samples()), seconds)

    async def _measure_round(self, cell: Cell, fetch: Fetch, samples: Samples, seconds: float) -> None:
        cpu_s = self._cpu_s()
        started_s = before_s = time.perf_counter()
        calls = 0
        while before_s < started_s + seconds or calls < MIN_CALLS:
            await fetch(calls)
            after_s = time.perf_counter()
            samples.calls_us.append((after_s - before_s) * 1e6)
            before_s = after_s
            calls += 1
        gigabytes = calls * cell.num_bytes / 1e9
        samples.gb_per_s.append(gigabytes / (before_s - started_s))
        samples.cpu_s_per_gb.append((self._cpu_s() - cpu_s) / gigabytes)

    async def _measure_idle(self) -> None:
        """Shares of a core that both processes use with all connections open and nothing to do."""
        await asyncio.sleep(1.0)
        before = _cpu_seconds(self._holder_pid), time.process_time()
        await asyncio.sleep(IDLE_S)
        self.idle["holder"] = (_cpu_seconds(self._holder_pid) - before[0]) / IDLE_S
        self.idle["puller"] = (time.process_time() - before[1]) / IDLE_S

    def _cpu_s(self) -> float:
        return time.process_time() + _cpu_seconds(self._holder_pid)


def _transports() -> list[Transport]:
    transports: list[Transport] = [ShmTransport(SECRET.pull_key, [])]
    if ucx_importable():
        transports.append(UcxTransport(UcxReactor(), SECRET.pull_key))
    return [*transports, GrpcTransport(SECRET)]


def _path_of(transport: Transport, peer: PeerAddress) -> MakePath:
    return lambda cell, target: transport_path(cell, target, transport, peer)


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process: its clock's id is made of its pid (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A holder process; it ends when its stdin closes."""
    command = [sys.executable, "-m", "bench.kv_holder"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def rows(run: Run) -> list[dict[str, Any]]:
    """Results of the run, one for each path and cell."""
    found: list[dict[str, Any]] = []
    for (name, cell), samples in run.measured.items():
        found.append(
            {
                "block_bytes": cell.block_bytes,
                "tier": "ram",
                "transport": name,
                "same_host": True,
                "in_flight": cell.in_flight,
                "verified": cell.verified,
                "gb_per_s": round(statistics.median(samples.gb_per_s), 3),
                "p50_us": round(samples.quantile_us(0.5), 1),
                "p99_us": round(samples.quantile_us(0.99), 1),
                "cpu_s_per_gb": round(statistics.median(samples.cpu_s_per_gb), 3),
            }
        )
    return found


def show(run: Run) -> None:
    """Print the table."""
    table = Table(title="KV blocks between two processes of one host, from RAM, verified")
    columns = ("block", "in flight", "path", "GB/s", "unverified", "p50 µs", "p99 µs", "CPU s/GB", "÷ memcpy", "÷ TCP")
    for column in columns:
        table.add_column(column, justify="left" if column == "path" else "right")
    by_key = {(row["transport"], row["block_bytes"], row["in_flight"], row["verified"]): row for row in rows(run)}
    for block_bytes in BLOCK_SIZES:
        for count in IN_FLIGHT:
            ceilings = [by_key[name, block_bytes, count, False]["gb_per_s"] for name in (MEMCPY, TCP)]
            for name in run.paths:
                plain = by_key[name, block_bytes, count, False]
                row = by_key.get((name, block_bytes, count, True), plain)
                ratios = [f"{row['gb_per_s'] / ceiling:.2f}" for ceiling in ceilings]
                figures = [f"{row['gb_per_s']:.2f}", f"{plain['gb_per_s']:.2f}"]
                times = [f"{row['p50_us']:,.0f}", f"{row['p99_us']:,.0f}", f"{row['cpu_s_per_gb']:.2f}"]
                table.add_row(f"{block_bytes // 1024} KiB", str(count), name, *figures, *times, *ratios)
            table.add_section()
    console = Console(width=120)
    console.print(table)
    idle = ", ".join(f"{name} {share:.2%}" for name, share in run.idle.items())
    console.print(f"idle, of one core: {idle}; load average at the start {run.load:.1f}")


def write(run: Run, path: Path) -> None:
    """Write the rows as JSON."""
    path.parent.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load_average": round(run.load, 2)}
    path.write_text(json.dumps({"machine": machine, "idle_cpu": run.idle, "rows": rows(run)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
