"""Stores on a directory of their own, and blocks that both sides of a test can make."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.announcements import Tier
from services.common.blocks import TENANT_TAG_BYTES, BlockId, owner_of
from services.common.security import MeshSecret
from services.common.transfer.header import decode_header, verify_payload
from services.common.transfer.protocol import PullRequest
from services.kvstore.arena import Arena
from services.kvstore.config import KvStoreSettings
from services.kvstore.ram_tier import RamTier
from services.kvstore.reservations import StoreReservation
from services.kvstore.ssd_files import WRITE_BYTES
from services.kvstore.ssd_layer import SsdLayer
from services.kvstore.ssd_setup import open_log
from services.kvstore.store import Store
from tests.common.transfer.blocks import SECRET, header, payload

BLOCK_BYTES = 192 * 64
SEGMENT_BYTES = 2**19
EPOCH = 5


@dataclass
class Announced:
    """The announcer's part, kept as a dict."""

    tiers: dict[BlockId, Tier] = field(default_factory=dict)

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None:
        self.tiers.update(dict.fromkeys(ids, tier))

    def remove(self, ids: Sequence[BlockId]) -> None:
        for block_id in ids:
            del self.tiers[block_id]


@dataclass
class Opened:
    """A store and what it announced. The layer runs only where a test says so."""

    store: Store
    ram: RamTier
    layer: SsdLayer
    announced: Announced


def settings(path: Path, **values: object) -> KvStoreSettings:
    """Eight segments of half a MiB where nothing else is said."""
    given = {"ssd_path": path, "ssd_bytes": 8 * SEGMENT_BYTES + 2**19, "ssd_segment_bytes": SEGMENT_BYTES, **values}
    return KvStoreSettings(**given)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def opened(
    path: Path,
    *,
    ram_blocks: int = 32,
    ram_owner_bytes: int = 0,
    clock: Callable[[], float] = lambda: 1e9,
    reached: Callable[[str], None] = lambda _: None,
    chunk_bytes: int = WRITE_BYTES,
    **values: object,
) -> AsyncIterator[Opened]:
    """A store over RAM and SSD, spilling in the background."""
    chosen = settings(path, **values)
    ram = RamTier(Arena(ram_blocks * BLOCK_BYTES), owner_bytes=ram_owner_bytes)
    announced = Announced()
    store = Store(ram, announced, epoch=EPOCH, clock=clock)
    log = open_log(chosen, MeshSecret(SECRET), reached=reached, chunk_bytes=chunk_bytes)
    assert log is not None
    layer = await store.attach_ssd(log, owner_bytes=chosen.owner_ssd_bytes, max_age_s=chosen.ssd_max_age_s)
    task = asyncio.create_task(layer.spiller.run())
    try:
        yield Opened(store, ram, layer, announced)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await layer.close()


def owner(letter: str, generation: int = 0) -> bytes:
    """An owner digest of a tenant that a letter stands for."""
    return owner_of(letter.encode() * TENANT_TAG_BYTES, generation)


async def offer(store: Store, ids: list[BlockId], *, first: int = 0, owner: bytes = bytes(16)) -> StoreReservation:
    """Blocks `first` on of a chain, offered and arrived."""
    data = [payload(block_id, BLOCK_BYTES) for block_id in ids[first:]]
    headers = [header(ids, first + i, block, owner) for i, block in enumerate(data)]
    reservation = await store.reserve(headers, 0)
    for buffer, block in zip(reservation.buffers, data[reservation.num_held :], strict=False):
        buffer[:] = block
    return reservation


async def push(store: Store, ids: list[BlockId], *, first: int = 0, owner: bytes = bytes(16)) -> int:
    """Offer blocks `first` on of a chain and have them kept; how many of its blocks are held then."""
    return await (await offer(store, ids, first=first, owner=owner)).commit()


async def pull(store: Store, ids: list[BlockId], deadline_s: float = 20.0) -> list[str]:
    """The tiers of the blocks that came, each compared with what was pushed."""
    lease = await store.lease(PullRequest(ids, 0, deadline_s))
    try:
        for block_id, block in zip(ids, lease.blocks, strict=False):
            decoded = decode_header(block.header)
            assert decoded.block_id == block_id
            verify_payload(decoded, block.payload)
            assert bytes(block.payload) == payload(block_id, BLOCK_BYTES), "wrong bytes"
        return [block.tier for block in lease.blocks]
    finally:
        lease.release(len(lease.blocks), lease.stop)


async def flushed(opened_store: Opened) -> None:
    """Everything that can be is on the SSD."""
    assert await opened_store.layer.flush(20.0)
