"""What the benches of the location index look up: one mesh, the same for every index that is measured.

Only the standard library is imported, since another index may live in an environment of its own. Blocks are those of
conversations that begin alike; each conversation is held by a few locations to different depths, one has all of it.
Beside them is a trunk, one prefix that every location holds to a depth of its own: the worst that can be asked for, at
rest and while locations go on along it. Nothing is timed here but by `quantiles_us`.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

CHAIN_BLOCKS = 4096
COMMON_BLOCKS = 64
TRUNK_BLOCKS = 512
MIN_HOLDERS = 8
# Ids in one announcement, as an announcer sends a whole set, and while it serves.
FULL_BATCH = 256
SMALL_BATCH = 4
# What is looked up. Of the changing trunk one location has taken a block more before each lookup.
CONVERSATION, TRUNK, CHANGING = "conversation", "trunk", "changing trunk"

Prompt = TypeVar("Prompt")


@dataclass(frozen=True, slots=True)
class Workload:
    """chains: prefixes, the trunk last. held: of each location the (chain, depth) it has."""

    chains: list[list[bytes]]
    held: list[list[tuple[int, int]]]
    num_blocks: int

    @property
    def num_locations(self) -> int:
        """Locations, each of which holds something."""
        return len(self.held)

    def parts(self, location: int) -> Iterator[tuple[bytes | None, list[bytes]]]:
        """What `location` announces: each part's parent and ids, no block twice and none before its parent."""
        held = self.held[location]
        if len(held) > 1:
            yield None, self.chains[0][:COMMON_BLOCKS]
        for number, depth in held:
            known = COMMON_BLOCKS if number < len(self.chains) - 1 else 0
            chain = self.chains[number]
            for at in range(known, depth, FULL_BATCH):
                yield chain[at - 1] if at else None, chain[at : min(depth, at + FULL_BATCH)]

    def growth(self, count: int) -> Iterator[tuple[int, bytes, bytes]]:
        """So many times a (location, parent, block): the location holds the trunk to the parent, and takes the block.

        Locations take turns; those that have all of the trunk are left out. Raises ValueError when all have it.
        """
        trunk, depths = self.chains[-1], [held[-1][1] for held in self.held]
        if count > sum(len(trunk) - depth for depth in depths):
            raise ValueError(f"the trunk has no room for {count} changes")
        for location in itertools.cycle(range(len(depths))):
            if not count:
                return
            if (depth := depths[location]) < len(trunk):
                yield location, trunk[depth - 1], trunk[depth]
                depths[location] += 1
                count -= 1

    def prompts(self, prompt: str, num_blocks: int, count: int) -> list[list[bytes]]:
        """Prompts of `num_blocks`, fresh objects as they come out of a message."""
        chains = self.chains[:-1] if prompt == CONVERSATION else self.chains[-1:]
        random.Random(7).shuffle(picked := list(range(len(chains))))
        sources = (chains[picked[number % len(chains)]] for number in range(count))
        return [[bytes(bytearray(id_)) for id_ in source[:num_blocks]] for source in sources]


def build(num_locations: int, num_blocks: int, seed: int = 1) -> Workload:
    """About `num_blocks` distinct blocks, and as many holders of each chain as give every location one."""
    draw = random.Random(seed)
    common = [draw.randbytes(16) for _ in range(COMMON_BLOCKS)]
    own_blocks = CHAIN_BLOCKS - COMMON_BLOCKS
    count = max(1, num_blocks // own_blocks)
    chains = [common + [draw.randbytes(16) for _ in range(own_blocks)] for _ in range(count)]
    holders = min(num_locations, max(MIN_HOLDERS, -(-num_locations // count)))
    held: list[list[tuple[int, int]]] = [[] for _ in range(num_locations)]
    turn = list(range(num_locations))
    draw.shuffle(turn)
    for number in range(count):
        for place in range(holders):
            # Log-uniform: most have the beginning, few the whole.
            depth = CHAIN_BLOCKS if not place else int(COMMON_BLOCKS * (CHAIN_BLOCKS / COMMON_BLOCKS) ** draw.random())
            held[turn[(number * holders + place) % num_locations]].append((number, depth))
    trunk = [draw.randbytes(16) for _ in range(TRUNK_BLOCKS)]
    for location in held:
        location.append((count, draw.randint(1, TRUNK_BLOCKS)))
    return Workload([*chains, trunk], held, count * own_blocks + COMMON_BLOCKS + TRUNK_BLOCKS)


def kinds(lengths: list[int]) -> list[tuple[str, int]]:
    """What is looked up, and of how many blocks, in order: the trunk changes last."""
    trunks = [(TRUNK, TRUNK_BLOCKS), (CHANGING, TRUNK_BLOCKS)]
    return [*((CONVERSATION, length) for length in lengths), *trunks]


def quantiles_us(
    find: Callable[[Prompt], object],
    prompts: Iterable[Prompt],
    *,
    cpu_time: bool,
    before_each: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """p50 and p99 of the time that one lookup takes: on the wall, or of the CPU in all threads of this process.

    CPU time leaves out waiting for another thread, and what a busy machine does in between. What `before_each` does
    is not timed.
    """
    clock_ns = time.process_time_ns if cpu_time else time.perf_counter_ns
    gc.collect()
    samples = []
    for prompt in prompts:
        before_each()
        began_ns = clock_ns()
        find(prompt)
        samples.append(clock_ns() - began_ns)
    samples.sort()
    return samples[len(samples) // 2] / 1e3, samples[len(samples) * 99 // 100] / 1e3


def resident_bytes() -> int:
    """Memory that this process has now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
