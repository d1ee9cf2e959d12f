"""`python -m bench.index_soak`: does a router's index stay as it is while prefixes come and go for minutes?

A real Valkey, a router process, and locations that announce through the real announcer: each holds as much as fits,
takes new conversations in, evicts the oldest from their ends, and now and then clears, or is killed and started again
under a new epoch. Once the change streams are as long as they may be, memory of the router and of Redis is sampled; the
table compares the first with the last third of the samples. At the end the churn stops, and the router must have
exactly what the locations hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kv_node import running_valkey
from bench.kv_table import Machine
from services.common.announcer import STREAM_ENTRIES, Announcer, Tier
from services.common.blocks import BlockId
from services.common.keys import NUM_SHARDS, KeySpace
from services.common.redis_client import RedisClient, connect_redis
from services.common.telemetry import configure_logging

RESULTS = Path(__file__).parent / "results" / "index_soak.json"
MIN_SAMPLES = 6
_MIB = 2**20
_START_DEADLINE_S = 60.0
_SETTLE_DEADLINE_S = 60.0
# Overviews that the router has made after the churn; it makes one every two seconds.
_QUIET_S = 6.0
# What the last third may have more than the first.
_MAY_GROW_SHARE, _MAY_GROW_MIB = 0.03, 2.0
_MAX_PROMPT_BLOCKS = 60
_FILL_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much goes through what. seconds: of samples. step_s: between two conversations of one location."""

    seconds: float = 180.0
    locations: int = 16
    blocks_each: int = 2_000
    step_s: float = 0.03
    # One step in so many is a clear, and one in so many a restart.
    clear_every: int = 2_000
    restart_every: int = 2_000
    sample_every_s: float = 1.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one moment."""

    router_rss_mib: float
    redis_mib: float
    stream_entries: int
    index_blocks: float


@dataclass(slots=True)
class Done:
    """What went through, and how it ended. divergences: digests that differed, in the whole run."""

    added_blocks: int = 0
    evicted_blocks: int = 0
    clears: int = 0
    restarts: int = 0
    held_blocks: int = 0
    indexed_blocks: float = 0.0
    divergences: float = 0.0
    duration_s: float = 0.0


class Holder:
    """One location, over its lives."""

    def __init__(self, client: RedisClient, number: int, plan: Plan, shared: list[BlockId]) -> None:
        self._client, self._number, self._plan, self._shared = client, number, plan, shared
        self._random = random.Random(plan.seed * 1000 + number)
        self._epoch = 0
        self.done = Done()
        self._start()

    @property
    def held(self) -> set[BlockId]:
        """Blocks that it has now."""
        return {*self._shared_held, *(id_ for chain in self._chains for id_ in chain)}

    async def run(self, ended: asyncio.Event) -> None:
        """Serve conversations until then."""
        while not ended.is_set():
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._plan.step_s)
            if self._random.randrange(self._plan.restart_every) == 0:
                await self._restart()
            elif self._random.randrange(self._plan.clear_every) == 0:
                self._clear()
            self._converse()

    async def flushed(self) -> None:
        """Wait until Redis knows everything. Raises TimeoutError."""
        await self._announcer.flushed(_SETTLE_DEADLINE_S)

    async def stop(self) -> None:
        """As a kill does: nothing is withdrawn."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        self._epoch += 1
        self._chains: deque[list[BlockId]] = deque()
        self._shared_held: list[BlockId] = []
        self._num_blocks = 0
        location = f"w{self._number}"
        self._announcer = Announcer(self._client, kind="worker", location_id=location, epoch=self._epoch)
        self._task = asyncio.create_task(self._announcer.run())

    async def _restart(self) -> None:
        await self.stop()
        self._start()
        self.done.restarts += 1

    def _clear(self) -> None:
        self._announcer.clear()
        self._chains.clear()
        self._shared_held = []
        self._num_blocks = 0
        self.done.clears += 1

    def _converse(self) -> None:
        """A new conversation that begins like all others; what is over the capacity leaves, oldest and last first."""
        chain = [BlockId(self._random.randbytes(16)) for _ in range(self._random.randint(1, _MAX_PROMPT_BLOCKS))]
        if not self._shared_held:
            self._shared_held = self._shared
            self._announcer.add(self._shared, Tier.HBM)
        self._announcer.add(chain, Tier.HBM)
        self._chains.append(chain)
        self._num_blocks += len(chain)
        self.done.added_blocks += len(chain)
        while (over := self._num_blocks - self._plan.blocks_each) > 0:
            oldest = self._chains[0]
            gone = oldest[-over:][::-1]
            del oldest[-over:]
            if not oldest:
                self._chains.popleft()
            self._announcer.remove(gone)
            self._num_blocks -= len(gone)
            self.done.evicted_blocks += len(gone)


class Router:
    """A router process and its metrics."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        ready = folder / "router.json"
        values = {"instance": "soak", "redis_url": redis_url, "mesh_secret": "s" * 32, "ready_file": str(ready)}
        environment = {f"KVMESH_ROUTER_{name.upper()}": value for name, value in values.items()}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")}
        with (folder / "router.log").open("wb") as log:
            command = [sys.executable, "-m", "services.router"]
            self.process = subprocess.Popen(command, env=kept | environment, stderr=log, stdout=log)
        deadline_s = time.monotonic() + _START_DEADLINE_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.process.kill()
                raise RuntimeError((folder / "router.log").read_text())
            time.sleep(0.05)
        self._metrics_url = f"http://{json.loads(ready.read_text())['metrics']}/metrics"

    def metric(self, name: str) -> float:
        """Its value, all labels summed."""
        with urllib.request.urlopen(self._metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.partition("{")[0].split(" ")[0] == name)

    def rss_mib(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB


class Soak:
    """One run."""

    def __init__(self, plan: Plan, client: RedisClient, router: Router) -> None:
        self.plan, self._client, self._router = plan, client, router
        self.samples: list[Sample] = []
        self.done = Done()

    async def run(self) -> None:
        """Churn, stop, compare. Raises TimeoutError when what was announced is not indexed in time."""
        began_s = time.monotonic()
        draw = random.Random(self.plan.seed)
        shared = [BlockId(draw.randbytes(16)) for _ in range(64)]
        holders = [Holder(self._client, number, self.plan, shared) for number in range(self.plan.locations)]
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for holder in holders:
                group.create_task(holder.run(ended))
            await self._streams_full()
            await self._sample(time.monotonic() + self.plan.seconds)
            ended.set()
        for holder in holders:
            await holder.flushed()
        await self._settle(len(set().union(*(holder.held for holder in holders))))
        for holder in holders:
            await holder.stop()
        for name in ("added_blocks", "evicted_blocks", "clears", "restarts"):
            setattr(self.done, name, sum(getattr(holder.done, name) for holder in holders))
        self.done.duration_s = round(time.monotonic() - began_s, 1)

    async def _streams_full(self) -> None:
        """Wait until every change stream in use has its full length."""
        async with asyncio.timeout(_FILL_DEADLINE_S):
            while any(0 < length < STREAM_ENTRIES for length in await self._stream_lengths()):  # noqa: ASYNC110 (Redis)
                await asyncio.sleep(self.plan.sample_every_s)

    async def _stream_lengths(self) -> list[int]:
        return [await self._client.xlen(KeySpace().shard(number).changes) for number in range(NUM_SHARDS)]

    async def _sample(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(self.plan.sample_every_s)
            memory = await self._client.info("memory")
            self.samples.append(
                Sample(
                    router_rss_mib=self._router.rss_mib(),
                    redis_mib=memory["used_memory"] / _MIB,
                    stream_entries=sum(await self._stream_lengths()),
                    index_blocks=await self._metric("kvmesh_router_index_blocks"),
                )
            )

    async def _settle(self, held_blocks: int) -> None:
        """Until the router has as many blocks as are held, and its overviews have then found nothing amiss."""
        async with asyncio.timeout(_SETTLE_DEADLINE_S):
            while await self._metric("kvmesh_router_index_blocks") != held_blocks:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.2)
        await asyncio.sleep(_QUIET_S)
        self.done.held_blocks = held_blocks
        self.done.indexed_blocks = await self._metric("kvmesh_router_index_blocks")
        self.done.divergences = await self._metric("kvmesh_router_index_divergence_total")

    async def _metric(self, name: str) -> float:
        return await asyncio.to_thread(self._router.metric, name)


@dataclass(frozen=True, slots=True)
class Drift:
    """Means of a quantity in the first and the last third of the samples."""

    what: str
    before: float
    after: float


def drifts(samples: list[Sample]) -> list[Drift]:
    """Of every quantity. Raises ValueError when there are too few samples."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few")
    third = len(samples) // 3

    def mean(part: list[Sample], name: str) -> float:
        return statistics.fmean(getattr(sample, name) for sample in part)

    names = [one.name for one in fields(Sample)]
    return [Drift(name, mean(samples[:third], name), mean(samples[-third:], name)) for name in names]


def violations(done: Done, found: list[Drift]) -> list[str]:
    """What did not stay as it was, and whether the index was wrong."""
    broken = [
        f"{one.what} grew from {one.before:.1f} to {one.after:.1f}"
        for one in found
        if one.what.endswith("_mib") and one.after > one.before * (1 + _MAY_GROW_SHARE) + _MAY_GROW_MIB
    ]
    if done.indexed_blocks != done.held_blocks:
        broken.append(f"{done.indexed_blocks:.0f} blocks in the index, {done.held_blocks} held")
    if done.divergences:
        broken.append(f"{done.divergences:.0f} digests differed")
    return broken


async def soak(plan: Plan, folder: Path) -> Soak:
    """Run `plan` with a Valkey and a router of its own."""
    with running_valkey(folder) as (_, url):
        router, client = Router(folder, url), connect_redis(url)
        try:
            run = Soak(plan, client, router)
            await run.run()
        finally:
            router.process.kill()
            router.process.wait(10)
            await client.aclose()
    return run


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=Plan().seconds)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    configure_logging("bench", "index_soak", "WARNING")
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    machine = Machine.here()
    try:
        run = asyncio.run(soak(Plan(seconds=arguments.seconds), folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = drifts(run.samples)
    table = Table("", "first third", "last third", "growth")
    for one in found:
        growth = (one.after - one.before) / one.before if one.before else 0.0
        table.add_row(one.what, f"{one.before:,.1f}", f"{one.after:,.1f}", f"{growth:+.2%}")
    Console(width=120).print(table)
    done = run.done
    print(
        f"{done.added_blocks:,} blocks added, {done.evicted_blocks:,} evicted, {done.clears} clears, {done.restarts} "
        f"restarts in {done.duration_s:g} s; {done.indexed_blocks:,.0f} of {done.held_blocks:,} held blocks in the "
        f"index at the end, {done.divergences:.0f} divergences"
    )
    results = {"machine": asdict(machine), "plan": asdict(run.plan), "done": asdict(done)}
    arguments.output.write_text(json.dumps(results | {"rows": [asdict(one) for one in found]}, indent=1) + "\n")
    broken = violations(done, found)
    print(*broken, sep="\n")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
