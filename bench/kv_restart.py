"""`python -m bench.kv_restart`: how soon does a kvstore node serve what its SSD holds after a restart?

Fills a real node's SSD with blocks of the default model (360 KiB, prompts of 2,000 tokens), ends it by SIGTERM and by
SIGKILL, drops its files from the page cache (and shows that they are gone) and starts it again. Counted from the start
of the process: until it is ready, until its first block has been pulled and verified, until the index lists all it
holds. Also how fast the SSD was filled, encrypted and not, beside plain O_DIRECT writes of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kv_node import (
    DEFAULT_BLOCK_BYTES,
    INSTANCE,
    SECRET,
    Node,
    NodeClient,
    Prompt,
    Pusher,
    block_format,
    chain,
    cpu_seconds,
    drop_from_page_cache,
    running_valkey,
)
from bench.kv_paths import Buffers
from bench.kv_table import Machine
from services.common.blocks import BlockId
from services.common.keys import KeySpace, location_key
from services.common.redis_client import connect_redis
from services.common.telemetry import configure_logging
from services.common.transfer.header import verify_block
from services.common.transfer.protocol import PullRequest
from services.common.transfer.shm_client import ShmTransport

PROMPT_BLOCKS = 125
RESULTS = Path(__file__).parent / "results" / "kv_restart.json"
_RAM_BYTES = 2**29
_UNWRITTEN_BYTES = _RAM_BYTES // 8
_RAW_BYTES = 2**30
_PULLS = 20
_PULL_DEADLINE_S = 10.0
_ANNOUNCE_DEADLINE_S = 60.0
Row = dict[str, Any]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=5.0, help="payload on the SSD")
    parser.add_argument("--rounds", type=int, default=3, help="restarts of each kind")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    configure_logging("bench", "kv_restart", "WARNING")
    state = Path(tempfile.mkdtemp(prefix="kvm-"))
    disk = Path(tempfile.mkdtemp(prefix="kvmesh-ssd-", dir=arguments.folder))
    machine = Machine.here()
    try:
        raw_gb_per_s = raw_writes(disk)
        with running_valkey(state) as (_, url):
            found = asyncio.run(run(state, disk, url, arguments.gib, arguments.rounds))
    finally:
        shutil.rmtree(state, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    results = {"machine": asdict(machine), "raw_write_gb_per_s": raw_gb_per_s, "imports_s": imports_s(), **found}
    show(results)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)


async def run(state: Path, disk: Path, redis_url: str, gib: float, rounds: int) -> dict[str, Any]:
    """Fill plainly and encrypted, and restart the encrypted one."""
    fills, restarts = [], []
    for encrypt in (False, True):
        settings = _settings(disk / f"encrypt-{encrypt}", gib, encrypt)
        prompts = [
            chain(number, PROMPT_BLOCKS) for number in range(int(gib * 2**30 / DEFAULT_BLOCK_BYTES / PROMPT_BLOCKS) + 1)
        ]
        node = Node(state, redis_url, **settings)
        try:
            fills.append(await fill(node, prompts) | {"encrypted": encrypt})
            for number in range(2 * rounds if encrypt else 0):
                await _end(node, by_kill=number % 2 == 1)
                drop_from_page_cache(settings["ssd_path"])
                node = Node(state, redis_url, **settings)
                restarts.append(
                    await restarted(node, redis_url, prompts) | {"after": ("SIGTERM", "SIGKILL")[number % 2]}
                )
        finally:
            node.kill()
        shutil.rmtree(settings["ssd_path"])
    return {"fills": fills, "restarts": restarts}


def _settings(path: Path, gib: float, encrypt: bool) -> dict[str, Any]:
    # Frames do not cross segments, whose ends stay unused.
    space = int(gib * 2**30 * 1.25) + 2**28
    return {"ram_bytes": _RAM_BYTES, "ssd_path": path, "ssd_bytes": space, "ssd_encrypt": encrypt}


async def _end(node: Node, *, by_kill: bool) -> None:
    if by_kill:
        node.kill()
    else:
        await asyncio.to_thread(node.terminate)


async def fill(node: Node, prompts: Sequence[Sequence[BlockId]]) -> Row:
    """Push everything; the time until it is on the disk, taking the blocks in included."""
    pusher, client = Pusher(), NodeClient(node)
    started_s, cpu_s = time.perf_counter(), cpu_seconds(node.pid)
    for ids in prompts:
        if await pusher.push(node, DEFAULT_BLOCK_BYTES, Prompt(ids)) != len(ids):
            raise RuntimeError("the node did not take all blocks")
        await client.written(_UNWRITTEN_BYTES, DEFAULT_BLOCK_BYTES)
    await client.written(0, 1)
    duration_s, cpu_s = time.perf_counter() - started_s, cpu_seconds(node.pid) - cpu_s
    stats = (await client.stats()).ssd
    await pusher.close()
    await client.close()
    if stats.dropped_blocks:
        raise RuntimeError(f"{stats.dropped_blocks} blocks did not reach the SSD")
    gigabytes = stats.payload_bytes / 1e9
    return {
        "stored_gb": round(gigabytes, 2),
        "gb_per_s": round(gigabytes / duration_s, 2),
        "cpu_s_per_gb": round(cpu_s / gigabytes, 2),
    }


async def restarted(node: Node, redis_url: str, prompts: Sequence[Sequence[BlockId]]) -> Row:
    """What a node that has just become ready does."""
    announced = asyncio.create_task(_announced(redis_url, sum(map(len, prompts))))
    transport, target = ShmTransport(SECRET.pull_key, []), Buffers(DEFAULT_BLOCK_BYTES, PROMPT_BLOCKS)
    single_us, prompt_ms, first_s = [], [], 0.0
    for number in range(_PULLS):
        begun_s = time.perf_counter()
        await _pull(transport, node, prompts[-1 - number][:1], target)
        single_us.append((time.perf_counter() - begun_s) * 1e6)
        first_s = first_s or time.perf_counter() - node.started_s
    started_s = time.perf_counter()
    for ids in prompts[:_PULLS]:
        begun_s = time.perf_counter()
        await _pull(transport, node, ids, target)
        prompt_ms.append((time.perf_counter() - begun_s) * 1e3)
    gigabytes = _PULLS * PROMPT_BLOCKS * DEFAULT_BLOCK_BYTES / 1e9
    read_gb_per_s = gigabytes / (time.perf_counter() - started_s)
    announced_s = await announced - node.started_s
    await transport.close()
    opened = node.logged("ssd tier is open")
    return {
        "ready_s": round(node.ready_s - node.started_s, 3),
        "scan_s": opened["duration_s"],
        "scan_gb_per_s": round(opened["payload_bytes"] / 1e9 / opened["duration_s"], 1),
        "stored_gb": round(opened["payload_bytes"] / 1e9, 2),
        "first_block_s": round(first_s, 3),
        "announced_s": round(announced_s, 3),
        "first_pull_us": round(single_us[0]),
        "one_block_p50_us": round(statistics.median(single_us)),
        "prompt_p50_ms": round(statistics.median(prompt_ms), 1),
        "read_gb_per_s": round(read_gb_per_s, 2),
    }


async def _pull(transport: ShmTransport, node: Node, ids: Sequence[BlockId], target: Buffers) -> None:
    def on_block(index: int, header: bytes, tier: str) -> None:
        verify_block(header, target.slots[index], ids[index], block_format(DEFAULT_BLOCK_BYTES))
        if tier != "ssd":
            raise RuntimeError(f"a block came from {tier}")

    result = await transport.pull(node.peer, PullRequest(ids, 0, _PULL_DEADLINE_S), target.slots[: len(ids)], on_block)
    if result.num_blocks != len(ids):
        raise RuntimeError(f"{result.num_blocks} of {len(ids)} blocks: {result.stop}")


async def _announced(redis_url: str, num_blocks: int) -> float:
    """When the index listed so many blocks of the node."""
    client, location = connect_redis(redis_url), location_key("kvstore", INSTANCE)
    key = KeySpace().shard_of(location).blocks(location)
    async with asyncio.timeout(_ANNOUNCE_DEADLINE_S):
        while True:
            if await client.hlen(key) >= num_blocks:
                break
            await asyncio.sleep(0.005)
    await client.aclose()
    return time.perf_counter()


def raw_writes(folder: Path) -> float:
    """GB/s of one thread that writes past the page cache."""
    chunk = Buffers(8 * 2**20, 1).memory
    chunk[:] = os.urandom(len(chunk))
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, _RAW_BYTES)
    started_s = time.perf_counter()
    for offset in range(0, _RAW_BYTES, len(chunk)):
        os.pwrite(fd, chunk, offset)
    os.fdatasync(fd)
    duration_s = time.perf_counter() - started_s
    os.close(fd)
    os.unlink(folder / "raw")
    return round(_RAW_BYTES / 1e9 / duration_s, 2)


def imports_s() -> float:
    """Seconds that a process needs for the node's modules alone, interpreter included."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import services.kvstore.__main__"], check=True)
    return round(time.perf_counter() - started_s, 3)


def show(results: dict[str, Any]) -> None:
    """Print two tables."""
    console = Console(width=160)
    fills = Table(title=f"filling; plain O_DIRECT writes {results['raw_write_gb_per_s']} GB/s")
    restarts = Table(title=f"restarts; imports alone take {results['imports_s']} s")
    for table, rows in ((fills, results["fills"]), (restarts, results["restarts"])):
        for column in rows[0]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()
