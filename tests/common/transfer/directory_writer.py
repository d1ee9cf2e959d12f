"""A process whose blocks change all the time: `python -m tests.common.transfer.directory_writer`.

Shows a few slots and their directory under an address that it prints, and lets block after block take the slots.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys

from services.common.blocks import BlockId
from services.common.security import MeshSecret
from services.common.transfer.shm_connection import ShmConnection, listen
from services.common.transfer.shm_directory import BlockDirectory
from services.common.transfer.shm_regions import create_region
from tests.common.transfer.blocks import EPOCH, SECRET

NUM_SLOTS = 4
SLOT_BYTES = 64 * 1024
_NUM_IDS = 12
_ADDRESS = "127.0.0.1:65003"


def ids_of_writer() -> list[BlockId]:
    """Blocks that take turns; they share buckets."""
    return [BlockId(struct.pack("<QQ", number % 2, number + 1)) for number in range(_NUM_IDS)]


def content(block_id: BlockId) -> bytes:
    """The bytes of a block: every word of them is its own."""
    return bytes(block_id) * (SLOT_BYTES // len(block_id))


async def serve() -> None:
    """One reader, then churn until stdin closes."""
    key = MeshSecret(SECRET).pull_key
    region = create_region("kvmesh-churn", NUM_SLOTS * SLOT_BYTES)
    directory = BlockDirectory.create(NUM_SLOTS * SLOT_BYTES, EPOCH)
    assert region is not None
    assert directory is not None
    listener = listen(key, _ADDRESS)
    print(_ADDRESS, flush=True)
    endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
    await ShmConnection.accept(endpoint, key, [region], directory.region)
    contents = {block_id: content(block_id) for block_id in ids_of_writer()}
    held: dict[int, BlockId] = {}
    for slot, block_id in zip(itertools.cycle(range(NUM_SLOTS)), itertools.cycle(contents), strict=False):
        if slot in held:
            directory.remove(held[slot])
        offset = slot * SLOT_BYTES
        region.view[offset : offset + SLOT_BYTES] = contents[block_id]
        directory.add(block_id, offset, SLOT_BYTES, bytes(block_id) * 4)
        held[slot] = block_id


if __name__ == "__main__":
    asyncio.run(serve())
    sys.exit(1)
