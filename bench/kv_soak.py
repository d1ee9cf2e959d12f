"""`python -m bench.kv_soak`: does a kvstore node stay as it is while ten times what it can hold goes through it?

Prompts of several owners are pushed, pulled (each block verified) and cleared, quotas bite, and in the first part the
node is stopped and killed and started again. Its memory, open files, SSD and Redis are sampled throughout; the table
compares the first with the last third of the samples of its last life, taken once everything was full.

What "30 minutes" means: a worker that prefills without a pause writes one block for 16 tokens. At the 1,400 tokens/s
that 2 cores reach with the default model those are 88 blocks a second, 158,000 in half an hour. So many go through
here, as fast as the node takes them; blocks are smaller than that model's, since what might leak goes by their number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.kv_node import INSTANCE, SECRET, Node, NodeClient, Prompt, Pusher, block_format, chain, running_valkey
from bench.kv_probe import Probe, Sample
from bench.kv_table import Machine
from services.common.announcer import STREAM_ENTRIES
from services.common.blocks import TENANT_TAG_BYTES, owner_of, split_owner
from services.common.telemetry import configure_logging
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.header import verify_block
from services.common.transfer.protocol import PullRequest, Transport
from services.common.transfer.shm_client import ShmTransport

RESULTS = Path(__file__).parent / "results" / "kv_soak.json"
MIN_SAMPLES = 6
# What the last third may have more than the first, beside a share of it.
_MAY_GROW = {
    "rss_mib": 2.0,
    "anonymous_mib": 2.0,
    "threads": 2.0,
    "open_files": 4.0,
    "ssd_files": 2.0,
    "redis_keys": 0.0,
}
_MAY_GROW_SHARE = 0.03
# Redis trims streams by whole nodes. An announcement of a few blocks takes a tenth of what the largest does.
_STREAM_SLACK = 1.05
_REDIS_BASE_MIB, _REDIS_BLOCK_BYTES, _CHANGE_BYTES = 4.0, 256, 1024
_MAX_PROMPT_BLOCKS = 40
_PULL_DEADLINE_S = 10.0
# One pull in so many goes over gRPC.
_GRPC_EVERY = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How much goes through what. An owner may take `quota` of either tier; `restarts` happen in the first part.

    clear_every: one prompt in so many is followed by a clear.
    """

    num_blocks: int = 160_000
    block_bytes: int = 64 * 1024
    ram_bytes: int = 128 * 2**20
    ssd_bytes: int = 896 * 2**20
    ssd_segment_bytes: int = 0
    owners: int = 6
    quota: float = 0.4
    restarts: int = 4
    restarts_share: float = 0.25
    clear_every: int = 200
    sample_every_s: float = 0.25
    seed: int = 1

    @property
    def capacity_blocks(self) -> int:
        """What both tiers hold at most."""
        return (self.ram_bytes + self.ssd_bytes) // self.block_bytes


@dataclass(slots=True)
class Done:
    """Counts of what was asked and answered. pushed: distinct blocks that the node took."""

    offered_blocks: int = 0
    pushed_blocks: int = 0
    asked_blocks: int = 0
    pulled_blocks: int = 0
    clears: int = 0
    cleared_blocks: int = 0
    restarts: int = 0
    duration_s: float = 0.0


class Soak:
    """One run. `samples` are those of the last life of the node, from when as much as it holds has gone through it."""

    def __init__(self, plan: Plan, folder: Path, redis_url: str) -> None:
        self.plan = plan
        self.done = Done()
        self.samples: list[Sample] = []
        self.highest = Sample()
        self._folder = folder
        self._redis_url = redis_url
        self._random = random.Random(plan.seed)
        # Their present generations.
        self._owners = [owner_of(bytes([number + 1] * TENANT_TAG_BYTES), 0) for number in range(plan.owners)]
        # As many as fill the node twice: half of what is asked for has gone.
        self._known: deque[Prompt] = deque(maxlen=max(8, 2 * plan.capacity_blocks // (_MAX_PROMPT_BLOCKS // 2)))
        self._transports: list[Transport] = [ShmTransport(SECRET.pull_key, []), GrpcTransport(SECRET)]
        self._pusher = Pusher()

    async def run(self) -> None:
        """Push everything; raises when a block is not what it must be."""
        started_s = time.monotonic()
        restart_at = self._restart_points()
        while self.done.pushed_blocks < self.plan.num_blocks:
            until = restart_at.pop(0) if restart_at else self.plan.num_blocks
            await self._life(until, is_last=until == self.plan.num_blocks)
        await self._pusher.close()
        for transport in self._transports:
            await transport.close()
        self.done.duration_s = round(time.monotonic() - started_s, 1)

    def _restart_points(self) -> list[int]:
        span = int(self.plan.num_blocks * self.plan.restarts_share)
        return [span * (i + 1) // self.plan.restarts for i in range(self.plan.restarts)]

    async def _life(self, until: int, *, is_last: bool) -> None:
        plan = self.plan
        node = Node(
            self._folder,
            self._redis_url,
            ram_bytes=plan.ram_bytes,
            ssd_path=self._folder / "ssd",
            ssd_bytes=plan.ssd_bytes,
            ssd_segment_bytes=plan.ssd_segment_bytes,
            owner_ram_bytes=int(plan.ram_bytes * plan.quota),
            owner_ssd_bytes=int(plan.ssd_bytes * plan.quota),
        )
        try:
            client = NodeClient(node)
            probe = Probe(node.pid, self._folder / "ssd", self._redis_url, INSTANCE)
            full_at = self.done.pushed_blocks + plan.capacity_blocks
            sampled_s = 0.0
            while self.done.pushed_blocks < until:
                await self._step(node, client)
                if time.monotonic() >= sampled_s + plan.sample_every_s:
                    sampled_s = time.monotonic()
                    sample = await probe.sample(await client.stats())
                    self.highest = self.highest.highest(sample)
                    if is_last and self.done.pushed_blocks >= full_at:
                        self.samples.append(sample)
            await probe.close()
            await client.close()
        finally:
            if is_last or self.done.restarts % 2:
                node.kill()
            else:
                node.terminate()
        self.done.restarts += not is_last

    async def _step(self, node: Node, client: NodeClient) -> None:
        """A prompt comes, two are asked for, and now and then an owner is cleared."""
        # The first owner sends half of everything, which is more than its quota.
        owner = self._owners[0] if self._random.random() < 0.5 else self._random.choice(self._owners)
        prompt = Prompt(chain(self._random.getrandbits(64), self._length()), owner)
        self._known.append(prompt)
        self.done.offered_blocks += len(prompt.ids)
        self.done.pushed_blocks += await self._pusher.push(node, self.plan.block_bytes, prompt)
        for _ in range(2):
            await self._pull(node, self._random.choice(self._known))
        if self._random.randrange(self.plan.clear_every) == 0:
            self.done.clears += 1
            self.done.cleared_blocks += await self._clear(client, self._random.randrange(len(self._owners)))

    async def _clear(self, client: NodeClient, number: int) -> int:
        """An owner's next generation begins. Returns how many blocks in RAM went."""
        tag, generation = split_owner(self._owners[number])
        self._owners[number] = owner_of(tag, generation + 1)
        return await client.clear(self._owners[number])

    def _length(self) -> int:
        return self._random.randint(1, _MAX_PROMPT_BLOCKS)

    async def _pull(self, node: Node, prompt: Prompt) -> None:
        size, ids = self.plan.block_bytes, prompt.ids
        memory = memoryview(bytearray(size * len(ids)))
        buffers = [memory[i * size : (i + 1) * size] for i in range(len(ids))]

        def on_block(index: int, header: bytes, _: str) -> None:
            if verify_block(header, buffers[index], ids[index], block_format(size)).owner_digest != prompt.owner:
                raise RuntimeError("a block of another owner")

        transport = self._transports[self._random.randrange(_GRPC_EVERY) == 0]
        result = await transport.pull(node.peer, PullRequest(ids, 0, _PULL_DEADLINE_S), buffers, on_block)
        self.done.asked_blocks += len(ids)
        self.done.pulled_blocks += result.num_blocks
        if result.num_blocks and prompt.owner not in self._owners:
            raise RuntimeError("a block of an owner that was cleared")


@dataclass(frozen=True, slots=True)
class Drift:
    """A quantity's means in the first and the last third of the samples."""

    what: str
    first: float
    last: float
    highest: float

    @property
    def growth(self) -> float:
        """Share by which it grew."""
        return (self.last - self.first) / self.first if self.first else 0.0


def drifts(samples: Sequence[Sample], highest: Sample) -> list[Drift]:
    """Of every quantity. Raises ValueError when too little went through the node."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples since the node was full: too few blocks went through it")
    third = len(samples) // 3
    names = [one.name for one in fields(Sample)]
    return [
        Drift(name, _mean(samples[:third], name), _mean(samples[-third:], name), getattr(highest, name))
        for name in names
    ]


def _mean(samples: Sequence[Sample], name: str) -> float:
    return statistics.fmean(getattr(sample, name) for sample in samples)


def violations(plan: Plan, samples: Sequence[Sample], highest: Sample) -> list[str]:
    """Which bounds did not hold."""
    found = [
        f"{one.what} grew from {one.first:.1f} to {one.last:.1f}"
        for one in drifts(samples, highest)
        if one.what in _MAY_GROW and one.last - one.first > _MAY_GROW[one.what] + _MAY_GROW_SHARE * one.first
    ]
    changes = STREAM_ENTRIES * _STREAM_SLACK
    limits = {
        "ram_blocks": plan.ram_bytes // plan.block_bytes,
        "ssd_mib": plan.ssd_bytes / 2**20,
        "redis_blocks": plan.capacity_blocks,
        "redis_changes": changes,
        "redis_mib": _REDIS_BASE_MIB + (plan.capacity_blocks * _REDIS_BLOCK_BYTES + changes * _CHANGE_BYTES) / 2**20,
    }
    for name, limit in limits.items():
        if getattr(highest, name) > limit:
            found.append(f"{name} reached {getattr(highest, name):.1f}, over {limit:.1f}")
    return found


async def soak(plan: Plan, folder: Path) -> Soak:
    """Run `plan` with a Valkey of its own."""
    with running_valkey(folder) as (_, url):
        run = Soak(plan, folder, url)
        await run.run()
    return run


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=Plan().num_blocks)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    configure_logging("bench", "kv_soak", "WARNING")
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    machine = Machine.here()
    try:
        run = asyncio.run(soak(Plan(num_blocks=arguments.blocks), folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = drifts(run.samples, run.highest)
    show(run, found)
    results = {"machine": asdict(machine), "plan": asdict(run.plan), "done": asdict(run.done)}
    rows = [asdict(one) | {"growth": round(one.growth, 4)} for one in found]
    arguments.output.write_text(json.dumps(results | {"samples": len(run.samples), "rows": rows}, indent=1) + "\n")
    broken = violations(run.plan, run.samples, run.highest)
    print(*broken, sep="\n")
    sys.stdout.flush()
    os._exit(1 if broken else 0)


def show(run: Soak, found: Sequence[Drift]) -> None:
    """Print the table."""
    plan, done = run.plan, run.done
    title = (
        f"{done.pushed_blocks:,} blocks through a node that holds {plan.capacity_blocks:,}, in {done.duration_s:g} s"
    )
    table = Table(title=title)
    for column in ("", "first third", "last third", "growth", "highest ever"):
        table.add_column(column, justify="right" if column else "left")
    for one in found:
        table.add_row(
            one.what, *(f"{value:,.1f}" for value in (one.first, one.last)), f"{one.growth:+.2%}", f"{one.highest:,.1f}"
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{done.offered_blocks:,} blocks offered; {done.pulled_blocks:,} of {done.asked_blocks:,} asked for came, "
        f"all good; {done.clears} clears, {done.restarts} restarts, {len(run.samples)} samples"
    )


if __name__ == "__main__":
    main()
