"""`python -m bench.router`: how fast the router finds blocks, takes announcements in, and decides.

For each number of locations: p50 and p99 of a lookup in the index replica and of a whole decision (in process, without
gRPC), announced blocks applied per second, and the index's memory. Half of the lookups are for a prefix that many
locations share to different depths, half for one that a few hold.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
from rich.console import Console
from rich.table import Table

from services.common.announcements import Header, Kind, unpack_xor
from services.common.blocks import BlockId
from services.common.registry import LocationRecord
from services.router.admission import AdmissionConfig
from services.router.domain import Ask, AttemptId, Identity, Load, WorkerId
from services.router.holders import Holders
from services.router.index.replica import Replica
from services.router.placement import PlacementConfig, Placer
from services.router.workers import WorkerTable

_BATCH = 256
_DEPTH = 512
_CHAINS = 400
_NOW_S = 100.0


@dataclass(slots=True)
class Mesh:
    """An index filled with shared and private prefixes, and workers that are all alike."""

    replica: Replica
    placer: Placer
    shared: list[BlockId]
    chains: list[list[BlockId]]
    applied_blocks: int
    applied_s: float


def build(num_locations: int, num_entries: int, rng: np.random.Generator) -> Mesh:
    """`num_entries` in all, spread over the locations: each holds a part of the shared prefix and of some chains."""
    replica = Replica()
    shared = _chain(_DEPTH)
    chains = [_chain(_DEPTH) for _ in range(_CHAINS)]
    applied, seconds = 0, 0.0
    for number in range(num_locations):
        held: dict[BlockId, None] = dict.fromkeys(shared[: int(rng.choice([64, 128, 256, 512]))])
        while len(held) < num_entries // num_locations and len(held) < _DEPTH * 50:
            held.update(dict.fromkeys(chains[int(rng.integers(_CHAINS))][: int(rng.integers(16, _DEPTH))]))
        messages = list(_announcements(list(held)))
        began_s = time.perf_counter()
        for header, adds in messages:
            replica.apply(f"worker/w{number}", header, adds, [])
        seconds += time.perf_counter() - began_s
        applied += len(held)
    return Mesh(replica, _placer(replica, num_locations), shared, chains, applied, seconds)


def _chain(length: int) -> list[BlockId]:
    return [BlockId(os.urandom(16)) for _ in range(length)]


def _announcements(ids: list[BlockId]) -> Iterator[tuple[Header, list[tuple[BlockId, int]]]]:
    xor = 0
    for seq, at in enumerate(range(0, len(ids), _BATCH), 1):
        part = ids[at : at + _BATCH]
        for id_ in part:
            xor ^= unpack_xor(id_)
        kind = Kind.STAGED | (Kind.BEGIN if at == 0 else 0) | (Kind.COMMIT if at + _BATCH >= len(ids) else 0)
        yield Header(1, seq, Kind(kind), at + len(part), xor), [(id_, 0) for id_ in part]


def _placer(replica: Replica, num_workers: int) -> Placer:
    table = WorkerTable(pending_timeout_s=5.0)
    for number in range(num_workers):
        worker_id = WorkerId(f"w{number}")
        table.add(LocationRecord(kind="worker", id=worker_id, epoch=1, host="h", grpc_address="h:1"))
        table.identify(worker_id, _identity(worker_id), _NOW_S)
        table.report(worker_id, Load(1, True, False, number % 8, 0, number % 700, number % 8, 50_000), _NOW_S)
    return Placer(PlacementConfig("predicted_ttft", AdmissionConfig(30.0)), table, Holders(replica, table, {}))


def _identity(worker_id: WorkerId) -> Identity:
    return Identity(
        worker_id=worker_id,
        epoch=1,
        model="m",
        model_digest=b"d",
        context_length=131_072,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        weight_format="",
        block_tokens=16,
        layout_version=1,
        vocab_size=1,
        tokenizer_digest=b"",
        total_blocks=100_000,
        block_bytes=1 << 20,
        prefill_tokens_per_s=20_000,
        decode_step_s=0.01,
        step_token_budget=2048,
        max_running_requests=64,
    )


def _quantiles_us(action: Callable[[list[BlockId]], object], prompts: list[list[BlockId]]) -> tuple[float, float]:
    samples = []
    for prompt in prompts:
        began_s = time.perf_counter()
        action(prompt)
        samples.append(time.perf_counter() - began_s)
    p50, p99 = np.percentile(samples, [50, 99]) * 1e6
    return float(p50), float(p99)


def _prompts(mesh: Mesh, length: int, count: int) -> list[list[BlockId]]:
    """Fresh objects, as they come out of a message."""
    sources = [mesh.shared if number % 2 else mesh.chains[number % _CHAINS] for number in range(count)]
    return [[BlockId(bytes(bytearray(id_))) for id_ in source[:length]] for source in sources]


def _decide(placer: Placer, ids: list[BlockId]) -> object:
    ask = Ask(AttemptId("r", 1), "m", b"d", ids, len(ids) * 16 + 8, 128)
    return placer.place(ask, _NOW_S)


def _resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(num_locations: int, entries: int, lengths: list[int], samples: int) -> list[list[str]]:
    """Rows of the table for one number of locations."""
    before_bytes = _resident_bytes()
    mesh = build(num_locations, entries, np.random.default_rng(1))
    # The ids of the prefixes themselves are few beside the entries.
    entry_bytes = (_resident_bytes() - before_bytes) / mesh.applied_blocks
    gc.freeze()
    rows = []
    for length in lengths:
        prompts = _prompts(mesh, length, samples)
        find = _quantiles_us(mesh.replica.find, prompts)
        decide = _quantiles_us(partial(_decide, mesh.placer), prompts)
        rows.append(
            [
                *(
                    str(num_locations),
                    f"{mesh.applied_blocks:,}",
                    f"{len(mesh.replica.blocks):,}",
                    f"{entry_bytes:.0f}",
                ),
                *(f"{mesh.applied_blocks / mesh.applied_s:,.0f}", str(length)),
                *(f"{value:.0f}" for value in (*find, *decide)),
            ]
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locations", type=int, nargs="+", default=[16, 128, 1000])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--entries", type=int, default=1_000_000, help="(block, location) pairs in the index")
    parser.add_argument("--samples", type=int, default=1000)
    arguments = parser.parse_args()
    columns = ["locations", "entries", "distinct", "bytes/entry", "blocks/s in", "prompt blocks"]
    table = Table(*columns, "find p50 µs", "find p99 µs", "decide p50 µs", "decide p99 µs")
    for num_locations in arguments.locations:
        # A process of its own, so that its memory is that of this index.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for row in pool.submit(
                measure, num_locations, arguments.entries, arguments.blocks, arguments.samples
            ).result():
                table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
