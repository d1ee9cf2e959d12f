"""`python -m bench.kv`: how fast KV blocks come from a kvstore node of this host, by every path.

Blocks of 256 KiB, 1 MiB and 4 MiB in pulls of 1, 8 and 32 blocks, from the RAM and from the SSD of a real node
process: GB/s, p50 and p99 of a pull, CPU seconds of both processes for each GB, every block verified as it arrives;
rates without verification stand beside. Ceilings of the same run: memcpy, a plain blocking TCP socket, checksums,
O_DIRECT reads.
`--peers VENV` measures other systems as well, by the interpreter of an environment that has them. Paths take turns,
round by round, and the median round counts. Writes bench/results/kv.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

from bench.kv_measure import Measured
from bench.kv_node import SECRET, running_valkey
from bench.kv_paths import Cell
from bench.kv_peer_runs import Peers, measure_peers
from bench.kv_ram import measure_ram
from bench.kv_ssd import measure_disk, measure_ssd
from bench.kv_table import Machine, show, write
from services.common.telemetry import configure_logging
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor, ucx_importable

BLOCK_SIZES = (256 * 1024, 2**20, 4 * 2**20)
IN_FLIGHT = (1, 8, 32)
RESULTS = Path(__file__).parent / "results" / "kv.json"
PARTS = ("ram", "ssd", "peers")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.25, help="time for each cell in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="only these, separated by commas")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--peers", type=Path, help="a virtual environment with other systems (docs/benchmarks.md)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: unknown: {', '.join(sorted(unknown))}")
    configure_logging("bench", "kv", "WARNING")
    asyncio.run(run(arguments))
    sys.stdout.flush()
    # UCX's own teardown at interpreter exit can hang.
    os._exit(0)


async def run(arguments: argparse.Namespace) -> None:
    """All parts, one after the other: none runs beside another."""
    parts = set(arguments.parts.split(","))
    machine = Machine.here()
    state = Path(tempfile.mkdtemp(prefix="kvm-"))
    disk = Path(tempfile.mkdtemp(prefix="kvmesh-ssd-", dir=arguments.folder))
    try:
        measured, idle = await _measure(arguments, parts, state, disk)
        rows = [one.row() for one in measured]
        peers = await _peers(arguments) if "peers" in parts else Peers()
    finally:
        shutil.rmtree(state, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    rows += peers.rows
    show(rows, idle, peers.left_out, machine)
    write(arguments.output, rows, idle, peers.left_out, machine)


async def _measure(
    arguments: argparse.Namespace, parts: set[str], state: Path, disk: Path
) -> tuple[list[Measured], dict[str, float]]:
    cells = [Cell(size, count) for size in BLOCK_SIZES for count in IN_FLIGHT]
    effort = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    transports = _transports()
    found: list[Measured] = []
    idle: dict[str, float] = {}
    with running_valkey(state) as (_, url):
        if "ram" in parts:
            found, idle = await measure_ram(state / "ram", url, transports, cells, **effort)
        if "ssd" in parts:
            found += await measure_disk(disk, cells, **effort)
            # What is in no RAM is asked for in any case, and gRPC's own costs are those that RAM shows.
            first = {transport.name: transport for transport in reversed(transports)}
            fast = [first[name] for name in (ShmTransport.name, UcxTransport.name) if name in first]
            for name in ("sealed", "plain"):
                encrypt = name == "sealed"
                found += await measure_ssd(state / name, disk / name, url, fast, cells, encrypt=encrypt, **effort)
                shutil.rmtree(disk / name)
    for transport in transports:
        await transport.close()
    return found, idle


async def _peers(arguments: argparse.Namespace) -> Peers:
    cells = [(size, count) for size in BLOCK_SIZES for count in IN_FLIGHT]
    return await measure_peers(arguments.peers, cells, arguments.rounds, arguments.seconds)


def _transports() -> list[Transport]:
    key = SECRET.pull_key
    transports: list[Transport] = [ShmTransport(key, []), ShmTransport(key, [], ask_always=True)]
    if ucx_importable():
        transports.append(UcxTransport(UcxReactor(), key))
    return [*transports, GrpcTransport(SECRET)]


if __name__ == "__main__":
    main()
