"""`python -m bench.kv`: how fast blocks move between two processes of this host.

For blocks of 360 KiB (SmolLM2-135M in BF16) and 1 MiB and pulls of 1, 8 and 32 blocks: GB/s and the p50 of a pull,
over UCX and gRPC, with every block verified and without, beside memcpy and a plain blocking socket of the same run.
A second table gives what an idle holder with an open connection uses of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kv_holder import BLOCK_SIZES, NUM_BLOCKS, SECRET, SOCKET_REQUEST, block_format, block_ids
from services.common.telemetry import configure_logging
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.header import verify_block
from services.common.transfer.protocol import PeerAddress, PullRequest, Transport
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor, ucx_importable

_COUNTS = (1, 8, 32)
_IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One cell: median seconds of a call that moved this many bytes."""

    num_bytes: int
    median_s: float

    def __str__(self) -> str:
        return f"{self.num_bytes / self.median_s / 1e9:.2f} ({self.median_s * 1e6:,.0f})"


Row = dict[tuple[int, int], Figure]


class Buffers:
    """Destination slots, touched once so that page faults are not measured."""

    def __init__(self, size: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, NUM_BLOCKS * size))
        self.memory[:] = bytes(len(self.memory))
        self.slots = [self.memory[i * size : (i + 1) * size] for i in range(NUM_BLOCKS)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each cell")
    seconds = parser.parse_args().seconds
    configure_logging("bench", "kv", "WARNING")
    rows: dict[str, Row] = {"memcpy, one thread": measure_memcpy(seconds)}
    idle: dict[str, float] = {}
    for mode in ("ucx", "grpc") if ucx_importable() else ("grpc",):
        with holder(mode) as (process, addresses):
            if "plain blocking socket" not in rows:
                rows["plain blocking socket"] = measure_socket(addresses["port"], seconds)
            peer = PeerAddress(addresses["pull_address"], addresses["grpc_address"])
            for name, row in asyncio.run(measure_transport(mode, peer, seconds, process.pid, idle)).items():
                rows[name] = row
    show(rows, idle)
    sys.stdout.flush()
    # UCX's own teardown at interpreter exit can hang.
    os._exit(0)


def measure_memcpy(seconds: float) -> Row:
    """Copy blocks within this process."""
    row: Row = {}
    for size in BLOCK_SIZES:
        source, target = Buffers(size).memory, Buffers(size).memory
        for count in _COUNTS:
            num_bytes = count * size

            def copy(num_bytes: int = num_bytes, source: memoryview = source, target: memoryview = target) -> None:
                target[:num_bytes] = source[:num_bytes]

            row[size, count] = Figure(num_bytes, _median(copy, seconds))
    return row


def measure_socket(port: int, seconds: float) -> Row:
    """Ask for blocks over a blocking socket, received into place."""
    row: Row = {}
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in BLOCK_SIZES:
            memory = Buffers(size).memory
            for count in _COUNTS:

                def fetch(size: int = size, count: int = count, memory: memoryview = memory) -> None:
                    connection.sendall(SOCKET_REQUEST.pack(count, size))
                    connection.recv_into(memory, count * size, socket.MSG_WAITALL)

                row[size, count] = Figure(count * size, _median(fetch, seconds))
    return row


async def measure_transport(
    mode: str, peer: PeerAddress, seconds: float, holder_pid: int, idle: dict[str, float]
) -> dict[str, Row]:
    """Pulls with and without verification, then an idle while."""
    transport: Transport = UcxTransport(UcxReactor(), SECRET.pull_key) if mode == "ucx" else GrpcTransport(SECRET)
    rows: dict[str, Row] = {}
    for label, verified in (("verified", True), ("not verified", False)):
        row: Row = {}
        for size in BLOCK_SIZES:
            for count in _COUNTS:
                row[size, count] = await _measure_pulls(transport, peer, size, count, seconds, verified=verified)
        rows[f"{mode}, {label}"] = row
    before = _cpu_seconds(holder_pid), time.process_time()
    await asyncio.sleep(_IDLE_S)
    idle[f"{mode} holder"] = (_cpu_seconds(holder_pid) - before[0]) / _IDLE_S
    idle[f"{mode} puller"] = (time.process_time() - before[1]) / _IDLE_S
    await transport.close()
    return rows


async def _measure_pulls(
    transport: Transport, peer: PeerAddress, size: int, count: int, seconds: float, *, verified: bool
) -> Figure:
    ids, expected, buffers = block_ids(size)[:count], block_format(size), Buffers(size).slots[:count]

    def on_block(index: int, header: bytes, tier: str) -> None:
        if verified:
            verify_block(header, buffers[index], ids[index], expected)

    request = PullRequest(ids, 0, 10.0)
    times: list[float] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s or len(times) < 5:
        started_s = time.perf_counter()
        result = await transport.pull(peer, request, buffers, on_block)
        times.append(time.perf_counter() - started_s)
        assert result.num_blocks == count
    return Figure(count * size, statistics.median(times))


def _median(call: Callable[[], None], seconds: float) -> float:
    call()
    times: list[float] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s or len(times) < 5:
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


@contextlib.contextmanager
def holder(mode: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A holder process; it ends when its stdin closes."""
    command = [sys.executable, "-m", "bench.kv_holder", mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def show(rows: dict[str, Row], idle: dict[str, float]) -> None:
    """Print both tables."""
    console = Console(width=160)
    table = Table(title="GB/s (p50 µs of a call)")
    table.add_column("")
    for size in BLOCK_SIZES:
        for count in _COUNTS:
            table.add_column(f"{size // 1024} KiB ×{count}", justify="right")
    for name, row in rows.items():
        table.add_row(name, *(str(row[size, count]) for size in BLOCK_SIZES for count in _COUNTS))
    console.print(table)
    load = os.getloadavg()[0]
    console.print(
        "idle CPU: " + ", ".join(f"{name} {share:.2%}" for name, share in idle.items()) + f"; load average {load:.1f}"
    )


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
