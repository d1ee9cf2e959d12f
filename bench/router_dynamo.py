"""NVIDIA Dynamo's index through its Python binding (`dynamo.llm.RadixTree`, PyPI `ai-dynamo-runtime`).

Runs in an environment of its own with this repository on PYTHONPATH, and needs nothing else of it:
`VENV/bin/python -m bench.router_dynamo wall|cpu LOCATIONS BLOCKS SAMPLES LENGTH...` prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.router_workload import CHANGING, SMALL_BATCH, Workload, build, kinds, quantiles_us, resident_bytes


def _number(id_: bytes) -> int:
    return int.from_bytes(id_[:8], "little")


def stored_event(number: int, parent: bytes | None, ids: list[bytes]) -> bytes:
    """Blocks that a worker has come to hold, as the binding takes them."""
    blocks = [{"block_hash": _number(id_), "tokens_hash": _number(id_)} for id_ in ids]
    stored = {"parent_hash": None if parent is None else _number(parent), "blocks": blocks}
    return json.dumps({"event_id": number, "data": {"stored": stored}}).encode()


def _fill(tree: Any, workload: Workload) -> tuple[int, float]:
    """Announce everything; entries and seconds of it."""
    entries, seconds = 0, 0.0
    for location in range(len(workload.held)):
        parts = list(workload.parts(location))
        events = [stored_event(number, parent, ids) for number, (parent, ids) in enumerate(parts)]
        began_s = time.perf_counter()
        for event in events:
            tree.apply_event(location, event)
        # Events are applied by a thread of the binding's; a lookup waits for them.
        tree.find_matches([1])
        seconds += time.perf_counter() - began_s
        entries += sum(len(ids) for _, ids in parts)
    return entries, seconds


def _small_events(tree: Any, workload: Workload, count: int) -> float:
    """Events of a few blocks each, as while serving; how many a second."""
    chain = workload.chains[0]
    places = range(0, len(chain) - SMALL_BATCH, SMALL_BATCH)
    new = len(workload.held) + 1
    events: list[tuple[int, bytes]] = []
    while len(events) < count:
        for at in places:
            events.append((new, stored_event(at, chain[at - 1] if at else None, chain[at : at + SMALL_BATCH])))
        new += 1
    began_s = time.perf_counter()
    for worker, event in events:
        tree.apply_event(worker, event)
    tree.find_matches([1])
    return len(events) / (time.perf_counter() - began_s)


def _grow(tree: Any, growth: Iterator[tuple[int, bytes, bytes]]) -> None:
    location, parent, id_ = next(growth)
    # Numbers of events need only rise.
    tree.apply_event(location, stored_event(time.monotonic_ns(), parent, [id_]))
    tree.find_matches([1])


def measure(num_locations: int, num_blocks: int, samples: int, lengths: list[int], *, cpu_time: bool) -> dict[str, Any]:
    """Figures of one index; finds are by (prompt, blocks)."""
    tree_class = importlib.import_module("dynamo.llm").RadixTree
    workload = build(num_locations, num_blocks)
    before_bytes = resident_bytes()
    tree = tree_class()
    entries, seconds = _fill(tree, workload)
    held_bytes = resident_bytes() - before_bytes
    finds = []
    growth = workload.growth(samples)
    for prompt, length in kinds(lengths):
        prompts = [[_number(id_) for id_ in ids] for ids in workload.prompts(prompt, length, samples)]
        quantiles = quantiles_us(
            lambda ids: tree.find_matches(ids).scores,
            prompts,
            cpu_time=cpu_time,
            before_each=(lambda: _grow(tree, growth)) if prompt == CHANGING else lambda: None,
        )
        finds.append((prompt, length, *quantiles))
    return {
        "entries": entries,
        "blocks_per_s": entries / seconds,
        "announcements_per_s": _small_events(tree, workload, 20_000),
        "bytes_per_block": held_bytes / workload.num_blocks,
        "finds": finds,
    }


if __name__ == "__main__":
    clock, *numbers = sys.argv[1:]
    locations, blocks, samples, *lengths = map(int, numbers)
    print(json.dumps(measure(locations, blocks, samples, lengths, cpu_time=clock == "cpu")))
