"""The SSD tier of a kvstore node against the raw disk: spilling, cold reads, restart.

Blocks are those of the default model (360 KiB). Reads go past the page cache and are verified and, unless switched
off, decrypted; `raw` is the same file system, O_DIRECT, in the same run. Writes bench/results/kv_ssd.json.

    python -m bench.kv_ssd --gib 5 --folder /var/tmp
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog

from services.common.announcements import Tier
from services.common.blocks import BlockId, chain_block_ids
from services.common.security import MeshSecret
from services.common.settings import load_settings
from services.common.transfer.header import UNKNOWN_PARENT, BlockFormat, Segment, make_header
from services.common.transfer.protocol import PullRequest
from services.kvstore.arena import Arena, Slot
from services.kvstore.config import KvStoreSettings
from services.kvstore.ram_tier import RamTier
from services.kvstore.ssd_layer import SsdLayer
from services.kvstore.ssd_setup import open_log
from services.kvstore.store import Store

BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 2
CHAIN_BLOCKS = 125
PUSH_BLOCKS = 25
_FORMAT = BlockFormat(b"m" * 16, "bfloat16", 3, BLOCK_BYTES, (Segment(0, 30, (3, 30, 2, 16, 64), "bfloat16"),))
_RAW_CHUNK = 8 * 2**20
_RESULTS = Path(__file__).parent / "results" / "kv_ssd.json"


class Silent:
    """Announces to nobody."""

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None: ...

    def remove(self, ids: Sequence[BlockId]) -> None: ...


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=5.0, help="payload to store")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-ssd-", dir=arguments.folder))
    try:
        rows = [raw(folder)]
        rows += [asyncio.run(tier(folder / str(seal), int(arguments.gib * 2**30), seal)) for seal in (True, False)]
    finally:
        shutil.rmtree(folder)
    report(rows)


def report(rows: list[dict[str, object]]) -> None:
    """A table and a file."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        print(f"{column:>26}", *(f"{row.get(column, '')!s:>14}" for row in rows))
    _RESULTS.parent.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 1), "kernel": os.uname().release}
    _RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def raw(folder: Path) -> dict[str, object]:
    """O_DIRECT writes and reads of 1 GiB in one thread."""
    total = 2**30
    memory = mmap.mmap(-1, _RAW_CHUNK)
    memory[:] = os.urandom(_RAW_CHUNK)
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, total)
    started_s = time.perf_counter()
    for offset in range(0, total, _RAW_CHUNK):
        os.pwrite(fd, memory, offset)
    os.fdatasync(fd)
    written_s = time.perf_counter()
    for offset in range(0, total, _RAW_CHUNK):
        os.preadv(fd, [memory], offset)
    read_s = time.perf_counter()
    single = []
    for number in range(20):
        begun_s = time.perf_counter()
        os.preadv(fd, [memoryview(memory)[:BLOCK_BYTES]], number * 12 * _RAW_CHUNK // 2)
        single.append(time.perf_counter() - begun_s)
    os.close(fd)
    os.unlink(folder / "raw")
    return {
        "what": "raw",
        "write_gb_per_s": round(total / 1e9 / (written_s - started_s), 2),
        "read_gb_per_s": round(total / 1e9 / (read_s - written_s), 2),
        "one_block_p50_us": round(sorted(single)[len(single) // 2] * 1e6),
    }


async def tier(path: Path, total: int, seal: bool) -> dict[str, object]:
    """Store `total` bytes, restart, read chains that are on the SSD only."""
    settings = load_settings(
        KvStoreSettings,
        ["--ssd-path", str(path), "--ssd-bytes", str(int(total * 1.2) + 2**28), "--ssd-encrypt", str(seal)],
    )
    chains = [prompt(number) for number in range(max(2, total // (CHAIN_BLOCKS * BLOCK_BYTES)))]
    row: dict[str, object] = {"what": "encrypted" if seal else "plain"}
    row |= await spill(settings, chains)
    row |= await restart(settings, chains)
    shutil.rmtree(path)
    return row


async def spill(settings: KvStoreSettings, chains: list[list[BlockId]]) -> dict[str, object]:
    """Push everything; the time until it is on the disk."""
    store, layer, task = await start(settings)
    payload = np.random.default_rng(0).bytes(BLOCK_BYTES)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for ids in chains:
        for first in range(0, len(ids), PUSH_BLOCKS):
            await push(store, ids, first, payload)
    await layer.flush(600)
    duration_s = time.perf_counter() - started_s
    num_bytes = layer.tier.totals.spilled_bytes
    await stop(layer, task)
    return {
        "stored_gb": round(num_bytes / 1e9, 2),
        "write_gb_per_s": round(num_bytes / 1e9 / duration_s, 2),
        "write_cpu_s_per_gb": round((time.process_time() - cpu_s) / (num_bytes / 1e9), 2),
        "dropped_blocks": layer.tier.totals.dropped_blocks,
    }


async def restart(settings: KvStoreSettings, chains: list[list[BlockId]]) -> dict[str, object]:
    """Time until a restarted node knows its blocks, and reads of whole chains."""
    store, layer, task = await start(settings)
    ready_s = layer.tier.totals.open_s
    held_gb = layer.tier.statistics().num_bytes / 1e9
    latencies, num_bytes = [], 0
    cpu_s, started_s = time.process_time(), time.perf_counter()
    for ids in chains[: max(2, int(2**30 // (CHAIN_BLOCKS * BLOCK_BYTES)))]:
        begun_s = time.perf_counter()
        lease = await store.lease(PullRequest(ids, 0, 60.0))
        latencies.append(time.perf_counter() - begun_s)
        num_bytes += sum(len(block.payload) for block in lease.blocks if block.tier == "ssd")
        lease.release(len(lease.blocks), lease.stop)
    duration_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    single = []
    for ids in chains[-20:]:
        begun_s = time.perf_counter()
        lease = await store.lease(PullRequest(ids[:1], 0, 60.0))
        single.append(time.perf_counter() - begun_s)
        lease.release(len(lease.blocks), lease.stop)
    await stop(layer, task)
    return {
        "restart_s_per_gb": round(ready_s / held_gb, 4),
        "restart_s": round(ready_s, 3),
        "read_gb_per_s": round(num_bytes / 1e9 / duration_s, 2),
        "read_cpu_s_per_gb": round(cpu_s / (num_bytes / 1e9), 2),
        "chain_of_125_p50_ms": round(sorted(latencies)[len(latencies) // 2] * 1e3, 1),
        "one_block_p50_us": round(sorted(single)[len(single) // 2] * 1e6),
    }


async def start(settings: KvStoreSettings) -> tuple[Store, SsdLayer, asyncio.Task[None]]:
    """A store with half a GiB of RAM, all of it touched once: the system's first page faults are not measured."""
    arena = Arena(2**29)
    for offset in range(0, arena.capacity_bytes, arena.slab_bytes):
        arena.view(Slot(offset, arena.slab_bytes, 0))[:] = bytes(arena.slab_bytes)
    store = Store(RamTier(arena), Silent(), epoch=1)
    log = open_log(settings, MeshSecret("a secret of this benchmark"))
    assert log is not None
    layer = await store.attach_ssd(log)
    return store, layer, asyncio.create_task(layer.run())


async def stop(layer: SsdLayer, task: asyncio.Task[None]) -> None:
    """As a node that ends."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await layer.close()


def prompt(number: int) -> list[BlockId]:
    """Ids of one chain."""
    root = BlockId(number.to_bytes(16, "little"))
    return chain_block_ids(b"k" * 32, root, np.arange(16 * CHAIN_BLOCKS, dtype=np.uint32))


async def push(store: Store, ids: list[BlockId], first: int, payload: bytes) -> None:
    """Offer a part of a chain; all blocks have the same bytes."""
    headers = [
        make_header(
            _FORMAT,
            ids[i],
            memoryview(payload),
            parent_id=ids[i - 1] if i else UNKNOWN_PARENT,
            starts_chain=i == 0,
        )
        for i in range(first, first + PUSH_BLOCKS)
    ]
    reservation = await store.reserve(headers, 0)
    for buffer in reservation.buffers:
        buffer[:] = payload
    await reservation.commit()


if __name__ == "__main__":
    main()
