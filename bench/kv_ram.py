"""The RAM half of `bench.kv`: pulls from a node's RAM over every transport, beside what this machine can do at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.kv_measure import Measured
from bench.kv_node import Node, Prompt, Pusher, chain, cpu_seconds, running_node
from bench.kv_paths import (
    Buffers,
    Cell,
    Seen,
    checksum_path,
    memcpy_path,
    socket_path,
    transport_path,
    walk_chain,
)
from bench.kv_peers import walked_blocks
from services.common.transfer.protocol import Transport

MEMCPY, TCP = "memcpy", "tcp socket"
_HEADROOM_BYTES = 256 * 2**20
_IDLE_S = 3.0
_SETTLE_S = 1.0


async def measure_ram(
    folder: Path,
    redis_url: str,
    transports: Sequence[Transport],
    cells: Sequence[Cell],
    *,
    rounds: int,
    seconds: float,
) -> tuple[list[Measured], dict[str, float]]:
    """Everything in RAM, size by size, the paths taking turns; and the shares of a core that idle processes use."""
    sizes = list(dict.fromkeys(cell.block_bytes for cell in cells))
    held_bytes = sum(size * walked_blocks(size) for size in sizes)
    found: list[Measured] = []
    with (
        running_node(folder, redis_url, ram_bytes=held_bytes + _HEADROOM_BYTES) as node,
        _plain_socket(max(size * walked_blocks(size) for size in sizes)) as (socket_pid, connection),
    ):
        await _fill(node, sizes)
        for size in sizes:
            part = [cell for cell in cells if cell.block_bytes == size]
            target = Buffers(size)
            paths = _ceilings(part, target, socket_pid, connection)
            paths += [path for transport in transports for path in _pulls(node, transport, part, target)]
            await run_rounds(paths, rounds, seconds)
            found += paths
        return found, await _idle(node.pid)


async def run_rounds(paths: Sequence[Measured], rounds: int, seconds: float) -> None:
    """One call of each that does not count, then each in turn, `rounds` times."""
    for path in paths:
        await path.call()
        path.seen.clear()
    for _ in range(rounds):
        for path in paths:
            await path.run_round(seconds)


async def _fill(node: Node, sizes: Sequence[int]) -> None:
    pusher = Pusher()
    for size in sizes:
        if await pusher.push(node, size, Prompt(chain(size, walked_blocks(size)))) != walked_blocks(size):
            raise RuntimeError("the node did not take all blocks")
    await pusher.close()


def _ceilings(cells: Sequence[Cell], target: Buffers, pid: int, connection: socket.socket) -> list[Measured]:
    source = Buffers(cells[0].block_bytes)
    source.memory[:] = bytes(range(256)) * (len(source.memory) // 256)
    found: list[Measured] = []
    for cell in cells:
        found.append(Measured(MEMCPY, cell, memcpy_path(cell, source, target), is_ceiling=True))
        found.append(Measured(TCP, cell, socket_path(cell, target, connection), (pid,), is_ceiling=True))
    for cached in (True, False):
        name = f"checksum, {'in' if cached else 'out of'} cache"
        cell = Cell(cells[0].block_bytes, 1)
        found.append(Measured(name, cell, checksum_path(cell, cached=cached), is_ceiling=True))
    return found


def _pulls(node: Node, transport: Transport, cells: Sequence[Cell], target: Buffers) -> Iterator[Measured]:
    for cell in cells:
        ids = chain(cell.block_bytes, walked_blocks(cell.block_bytes))
        for verified in (True, False):
            seen = Seen()
            fetch = transport_path(cell, target, transport, node.peer, walk_chain(cell, ids), seen, verify=verified)
            yield Measured(transport.name, cell, fetch, (node.pid,), verified=verified, seen=seen)


@contextlib.contextmanager
def _plain_socket(num_bytes: int) -> Iterator[tuple[int, socket.socket]]:
    """A process that serves its memory over a socket, and a connection to it."""
    command = [sys.executable, "-m", "bench.kv_socket", str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield process.pid, connection
        finally:
            process.kill()


async def _idle(node_pid: int) -> dict[str, float]:
    """Shares of a core that both processes use with all connections open and nothing to do."""
    await asyncio.sleep(_SETTLE_S)
    before = cpu_seconds(node_pid), time.process_time()
    await asyncio.sleep(_IDLE_S)
    return {
        "holder": round((cpu_seconds(node_pid) - before[0]) / _IDLE_S, 5),
        "puller": round((time.process_time() - before[1]) / _IDLE_S, 5),
    }
