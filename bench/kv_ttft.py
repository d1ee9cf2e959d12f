"""`python -m bench.kv_ttft`: time to the first token of a prompt with a 2,000-token prefix, by where that is cached.

Two local meshes of one worker each, whose pool holds little more than one such prompt, and one kvstore node: in the
first the node's RAM holds everything, in the second next to nothing, so that prefixes come from its SSD (its files are
dropped from the page cache before each request). Prefixes are sent once, never seen before (computed), at once again
with another end (the worker's own pool), and once more when others have driven them out (the node). Each request is one
over HTTP through Envoy, alone, and counts for a tier only if that tier gave the whole prefix. Medians of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from bench.kv_node import DEFAULT_BLOCK_BYTES, drop_from_page_cache
from bench.kv_table import Machine
from bench.load import Timing
from bench.load_http import HttpLoad, http_load
from services.cli.ports import free_ports
from services.common.models import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results" / "kv_ttft.json"
PREFIX_TOKENS = 2_000
_TAIL_TOKENS = 16
_OUTPUT_TOKENS = 2
_TOKENS = range(1_000, 40_000)
# The pool: one prompt of 126 blocks and a little more. The small RAM: one that is being pulled and one more.
_POOL_MB = 56
_LARGE_RAM_MB, _SMALL_RAM_MB, _SSD_MB = 2048, 112, 2048
_COMPUTED, _POOL, _RAM, _SSD = "computed", "local", "ram", "ssd"
_NAMES = {_COMPUTED: "recompute", _POOL: "the worker's own pool", _RAM: "kvstore RAM", _SSD: "kvstore SSD, cold"}
# So many that those of the small RAM have left it, and the pool, when they are asked for again.
_LEAST_ROUNDS = 5
_POLL_S = 0.05
_STORE_DEADLINE_S, _COUNTED_DEADLINE_S = 2.0, 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: where its prefix was to be, and how many of its tokens came from where."""

    tier: str
    ttft_s: float
    cached: dict[str, float]

    @property
    def is_pure(self) -> bool:
        """Whether the whole prefix came from that tier."""
        if self.tier == _COMPUTED:
            return not any(self.cached.values())
        return self.cached.get(self.tier, 0) >= PREFIX_TOKENS


class Mesh:
    """A running mesh, its load and its metrics."""

    def __init__(self, state: Path, load: HttpLoad, processes: list[dict[str, Any]]) -> None:
        self._state = state
        self._load = load
        self._metrics = {entry["kind"]: entry["metrics"] for entry in processes}

    async def send(self, tier: str, prefix: list[int], rng: random.Random) -> Sample:
        """A prompt that begins with `prefix`."""
        before, served = self._by_tier(), self._value("worker", "kvmesh_prompt_tokens_total")
        timing: Timing = await self._load.send([*prefix, *_random_tokens(_TAIL_TOKENS, rng)], _OUTPUT_TOKENS)
        await _until(lambda: self._value("worker", "kvmesh_prompt_tokens_total") != served, _COUNTED_DEADLINE_S)
        after = self._by_tier()
        return Sample(tier, timing.ttft_s, {name: after[name] - before.get(name, 0.0) for name in after})

    async def stored(self, tier: str, num_blocks: int) -> bool:
        """Wait until the node has so many blocks in a tier; False when it does not get them."""
        stored = "kvmesh_kvstore_stored_blocks"
        return await _until(lambda: self._value("kvstore", stored, tier) >= num_blocks, _STORE_DEADLINE_S)

    def drop_caches(self) -> None:
        """Make the node's files cold."""
        for folder in (self._state / "ssd").glob("*"):
            drop_from_page_cache(folder)

    def _by_tier(self) -> dict[str, float]:
        tiers = (_POOL, "peer", _RAM, _SSD)
        return {tier: self._value("worker", "kvmesh_cached_prompt_tokens_total", tier) for tier in tiers}

    def _value(self, kind: str, name: str, tier: str = "") -> float:
        wanted = f'tier="{tier}"' if tier else ""
        with urlopen(f"http://{self._metrics[kind]}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if re.split(r"[{ ]", line)[0] == name and wanted in line
        )


async def measure_tier(tier: str, rounds: int, folder: Path, seed: int) -> list[Sample]:
    """Samples of computing, of the worker's own pool and of the node's `tier`."""
    rng = random.Random(seed)
    prefixes = [_random_tokens(PREFIX_TOKENS, rng) for _ in range(max(_LEAST_ROUNDS, rounds))]
    samples: list[Sample] = []
    async with _mesh(folder, tier) as mesh:
        await mesh.send(_COMPUTED, _random_tokens(PREFIX_TOKENS, rng), rng)
        stored = PREFIX_TOKENS // 16
        for number, prefix in enumerate(prefixes, 1):
            samples.append(await mesh.send(_COMPUTED, prefix, rng))
            samples.append(await mesh.send(_POOL, prefix, rng))
            # What could not be pushed for want of room is offered again with the next request that ends there.
            while not await mesh.stored(tier, stored * (number + 1)):
                samples.append(await mesh.send(_POOL, prefix, rng))
        for prefix in prefixes:
            mesh.drop_caches()
            samples.append(await mesh.send(tier, prefix, rng))
    return samples


@asynccontextmanager
async def _mesh(folder: Path, tier: str) -> AsyncIterator[Mesh]:
    state = folder / f"mesh-{tier}"
    port = next(free_ports("127.0.0.1"))
    ram_mb = _LARGE_RAM_MB if tier == _RAM else _SMALL_RAM_MB
    sizes = ["--kv-cache-mb", str(_POOL_MB), "--kvstore-mb", str(ram_mb)]
    if tier == _SSD:
        sizes += ["--kvstore-ssd-mb", str(_SSD_MB)]
    await asyncio.to_thread(_kvmesh, state, "up", "--detach", "--http-port", str(port), *sizes)
    try:
        processes = json.loads(await asyncio.to_thread(_kvmesh, state, "ps", "--json"))
        async with http_load(f"http://127.0.0.1:{port}", DEFAULT_MODEL) as load:
            yield Mesh(state, load, processes)
    finally:
        await asyncio.to_thread(_kvmesh, state, "down")


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until it holds; whether it did in time."""
    for _ in range(int(timeout_s / _POLL_S)):
        if condition():
            return True
        await asyncio.sleep(_POLL_S)
    return condition()


def _kvmesh(state: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", *arguments, "--state", str(state)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout


def _random_tokens(count: int, rng: random.Random) -> list[int]:
    return rng.choices(_TOKENS, k=count)


def summary(samples: list[Sample]) -> list[dict[str, Any]]:
    """A row for each tier, from what came from that tier alone; ratio: how many times faster than computing."""
    computed_s = _median(samples, _COMPUTED)
    rows = []
    for tier in _NAMES:
        pure = [sample.ttft_s for sample in samples if sample.tier == tier and sample.is_pure]
        if not pure:
            continue
        rows.append(
            {
                "tier": tier,
                "ttft_ms": round(statistics.median(pure) * 1e3, 1),
                "fastest_ms": round(min(pure) * 1e3, 1),
                "slowest_ms": round(max(pure) * 1e3, 1),
                "ratio": round(computed_s / statistics.median(pure), 2),
                "samples": len(pure),
                "mixed": sum(sample.tier == tier for sample in samples) - len(pure),
            }
        )
    return rows


def _median(samples: list[Sample], tier: str) -> float:
    return statistics.median(sample.ttft_s for sample in samples if sample.tier == tier and sample.is_pure)


def report(rows: list[dict[str, Any]], machine: Machine, path: Path) -> None:
    """A table and a file."""
    table = Table("prefix of 2,000 tokens from", "TTFT ms", "fastest", "slowest", "× faster", "samples", "mixed")
    for row in rows:
        figures = ("ttft_ms", "fastest_ms", "slowest_ms", "ratio", "samples", "mixed")
        table.add_row(_NAMES[row["tier"]], *(str(row[name]) for name in figures))
    Console(width=120).print(table)
    document = {
        "machine": asdict(machine),
        "prefix_tokens": PREFIX_TOKENS,
        "prefix_mib": round(PREFIX_TOKENS // 16 * DEFAULT_BLOCK_BYTES / 2**20, 1),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    """Run, print, write; exit status 1 when a tier gave nothing whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help=f"prefixes of each tier, at least {_LEAST_ROUNDS}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    arguments = parser.parse_args()
    machine = Machine.here()
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-ttft-", dir=arguments.folder))
    try:
        seed = int.from_bytes(os.urandom(4), "little")
        samples = [
            sample
            for number, tier in enumerate((_RAM, _SSD))
            for sample in asyncio.run(measure_tier(tier, arguments.rounds, folder, seed + number))
        ]
    finally:
        shutil.rmtree(folder)
    rows = summary(samples)
    report(rows, machine, arguments.json)
    return 0 if {row["tier"] for row in rows} == set(_NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
