"""The SSD half of `bench.kv`: pulls of blocks that a node has on its SSD alone, beside the bare disk.

Every cell walks round prompts of its own that hold twice what the node's RAM does or more, so that a block has always
left RAM again when it is asked for anew. Warm pulls ask for one prompt again and again: the first brought it into RAM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.kv_measure import Measured
from bench.kv_node import Node, NodeClient, Prompt, Pusher, chain, running_node
from bench.kv_paths import Buffers, Cell, DiskFile, Seen, Wanted, disk_path, transport_path
from bench.kv_ram import run_rounds
from services.common.blocks import BlockId
from services.common.transfer.protocol import Transport

DISK, PAGE_CACHE = "disk, O_DIRECT", "page cache"
_RAM_BYTES = 256 * 2**20
_SET_BYTES = 2 * _RAM_BYTES
_MIN_PROMPTS = 8
_UNWRITTEN_BYTES = _RAM_BYTES // 8
_RAW_BYTES = _SET_BYTES
# Where encryption is compared with none.
_PLAIN_IN_FLIGHT = 8
_FIRST_PROMPT = 10**6
PromptSets = dict[Cell, list[list[BlockId]]]


async def measure_disk(folder: Path, cells: Sequence[Cell], *, rounds: int, seconds: float) -> list[Measured]:
    """The disk that `folder` is on, cold and out of the page cache; nothing where it cannot be read past it."""
    found: list[Measured] = []
    files: list[DiskFile] = []
    try:
        for cached, in_flight in itertools.product((False, True), dict.fromkeys(cell.in_flight for cell in cells)):
            files.append(DiskFile(folder / "raw", _RAW_BYTES, in_flight, cached=cached))
            name, cache = (PAGE_CACHE, "warm") if cached else (DISK, "cold")
            for cell in (cell for cell in cells if cell.in_flight == in_flight):
                fetch = disk_path(cell, Buffers(cell.block_bytes, 2 * in_flight), files[-1])
                found.append(Measured(name, cell, fetch, tier="ssd", cache=cache, is_ceiling=True))
        await run_rounds(found, rounds, seconds)
    finally:
        for file in files:
            file.close()
    return found


async def measure_ssd(
    folder: Path,
    ssd_path: Path,
    redis_url: str,
    transports: Sequence[Transport],
    cells: Sequence[Cell],
    *,
    encrypt: bool,
    rounds: int,
    seconds: float,
) -> list[Measured]:
    """Cold and warm pulls of encrypted blocks; of others, cold ones of one depth over the first transport."""
    if not encrypt:
        cells = [cell for cell in cells if cell.in_flight == _PLAIN_IN_FLIGHT]
        transports = transports[:1]
    sets: PromptSets = {}
    numbers = itertools.count(_FIRST_PROMPT)
    for cell in cells:
        count = max(_MIN_PROMPTS, _SET_BYTES // cell.num_bytes)
        sets[cell] = [chain(number, cell.in_flight) for number in itertools.islice(numbers, count)]
    stored_bytes = sum(cell.num_bytes * len(prompts) for cell, prompts in sets.items())
    space = stored_bytes * 5 // 4 + 2**28
    settings = {"ram_bytes": _RAM_BYTES, "ssd_path": ssd_path, "ssd_bytes": space, "ssd_encrypt": encrypt}
    with running_node(folder, redis_url, **settings) as node:
        await _fill(node, sets)
        cold = [path for cell in cells for path in _cold(node, transports, cell, sets[cell], encrypt)]
        await run_rounds(cold, rounds, seconds)
        if not encrypt:
            return cold
        warm = []
        for cell in cells:
            paths = list(_warm(node, transports, cell, sets[cell][0]))
            await run_rounds(paths, rounds, seconds)
            warm += paths
        return cold + warm


async def _fill(node: Node, sets: PromptSets) -> None:
    pusher, client = Pusher(), NodeClient(node)
    for cell, prompts in sets.items():
        for ids in prompts:
            if await pusher.push(node, cell.block_bytes, Prompt(ids)) != len(ids):
                raise RuntimeError("the node did not take all blocks")
            await client.written(_UNWRITTEN_BYTES, cell.block_bytes)
    await client.written(0, 1)
    if (dropped := (await client.stats()).ssd.dropped_blocks) > 0:
        raise RuntimeError(f"{dropped} blocks did not reach the SSD")
    await pusher.close()
    await client.close()


def _cold(
    node: Node, transports: Sequence[Transport], cell: Cell, prompts: list[list[BlockId]], encrypt: bool
) -> Iterator[Measured]:
    wanted, target = Wanted(prompts), Buffers(cell.block_bytes, 2 * cell.in_flight)
    for transport in transports:
        seen = Seen()
        fetch = transport_path(cell, target, transport, node.peer, wanted, seen, verify=True)
        name = transport.name if encrypt else f"{transport.name}, not encrypted"
        yield Measured(name, cell, fetch, (node.pid,), "ssd", "cold", verified=True, seen=seen)


def _warm(node: Node, transports: Sequence[Transport], cell: Cell, ids: list[BlockId]) -> Iterator[Measured]:
    wanted, target = Wanted([ids]), Buffers(cell.block_bytes, 2 * cell.in_flight)
    for transport in transports:
        seen = Seen()
        fetch = transport_path(cell, target, transport, node.peer, wanted, seen, verify=True)
        yield Measured(transport.name, cell, fetch, (node.pid,), "ssd", "warm", verified=True, seen=seen)
