"""The node's blocks as a source and a sink of transfers, and the announcements that follow from them.

RAM and SSD are each prefix-closed, so a chain is a prefix in RAM and a continuation on the SSD. Blocks are lent from
RAM only: what is wanted from the SSD is brought there first. A block is announced for the faster tier that has it,
and not before all its KV heads are here.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.common.generations import Generations
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import decode_header
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_MISSING,
    PullRequest,
)
from services.kvstore.arena import Slot
from services.kvstore.lending import StoreLease, note_read
from services.kvstore.metrics import Totals
from services.kvstore.part_reservation import PartReservation
from services.kvstore.partials import PartialBlocks, PartialStatistics
from services.kvstore.ram_tier import Entry, RamStatistics, RamTier
from services.kvstore.reservations import Offered, StoreReservation
from services.kvstore.ssd_index import SsdEntry
from services.kvstore.ssd_layer import SsdLayer, SsdLayerStatistics
from services.kvstore.ssd_log import SegmentLog
from services.kvstore.ssd_tier import SsdTier

# Why blocks of an owner that has been cleared since are refused.
CLEARED = "cleared"
# Longest time from the first to the last heads of a block.
PARTIAL_MAX_AGE_S = 10.0
_log = structlog.get_logger()


# Told of every pull: the blocks, whether the puller is on this host, and how many pulls are served now.
OnServed = Callable[[Sequence[BlockId], bool, int], None]


class Announcements(Protocol):
    """The part of the announcer that the store uses."""

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None: ...

    def remove(self, ids: Sequence[BlockId]) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Of both tiers, at one moment; ssd is None where there is no such tier."""

    ram: RamStatistics
    partial: PartialStatistics
    ssd: SsdLayerStatistics | None
    open_leases: int
    cleared_tenants: int


class Store:
    """BlockSource and BlockSink over both tiers. Everything runs on the event loop except checksums and the disk."""

    def __init__(
        self,
        ram: RamTier,
        announcements: Announcements,
        *,
        epoch: int,
        partial_bytes: int = 0,
        partial_max_age_s: float = PARTIAL_MAX_AGE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """partial_bytes: most memory for blocks of which heads are missing; 0: an eighth of the RAM tier."""
        self.epoch = epoch
        self.totals = Totals()
        # Blocks of dead owners are taken neither from an offer nor from one that is under way.
        self.generations = Generations()
        self.ssd: SsdLayer | None = None
        self.on_served: OnServed | None = None
        self._ram = ram
        self._announcements = announcements
        self._clock = clock
        self.partials = PartialBlocks(
            ram,
            self._allocate,
            self.totals.dropped_partials,
            max_bytes=partial_bytes or ram.statistics().capacity_bytes // 8,
            max_age_s=partial_max_age_s,
        )
        self._expiry: asyncio.TimerHandle | None = None

    def statistics(self) -> StoreStatistics:
        """A snapshot."""
        return StoreStatistics(
            self._ram.statistics(),
            self.partials.statistics(),
            self.ssd.statistics() if self.ssd is not None else None,
            self.totals.open_leases,
            len(self.generations),
        )

    async def attach_ssd(self, log: SegmentLog, *, owner_bytes: int = 0, max_age_s: float = 0.0) -> SsdLayer:
        """Open the SSD tier and announce what it holds. Called once; the caller runs and closes the layer."""
        tier = SsdTier(log, lost=self._lost, owner_bytes=owner_bytes, max_age_s=max_age_s, clock=self._clock)
        self.ssd = SsdLayer(self._ram, tier, self._allocate, self._promoted)
        self._announcements.add(await tier.start(), Tier.SSD)
        return self.ssd

    async def lease(self, request: PullRequest) -> StoreLease:
        """The leading blocks that are here; none for another epoch. Stops short when the SSD takes too long."""
        if request.epoch not in (0, self.epoch):
            return self._lend(request, [], [], STOP_EPOCH)
        entries = self._ram.lease(request.ids)
        num_ram, stop = len(entries), STOP_COMPLETE
        try:
            if self.ssd is not None:
                self.ssd.used(entries)
                stop = await self.ssd.extend(entries, request)
        except BaseException:
            self._ram.release(entries)
            raise
        if len(entries) < len(request.ids) and stop == STOP_COMPLETE:
            stop = STOP_MISSING
        self._served(request.ids[: len(entries)], request)
        return self._lend(request, entries[:num_ram], entries[num_ram:], stop)

    def was_read(self, request: PullRequest, duration_s: float) -> None:
        """A peer on this host has read these blocks in RAM by the directory."""
        entries = note_read(self._ram, self.totals, request, duration_s)
        self._served([entry.block_id for entry in entries], request)
        if self.ssd is not None:
            self.ssd.used(entries)

    def holds(self, block_id: BlockId) -> bool:
        """Whether a block is in either tier."""
        return block_id in self._ram or (self.ssd is not None and block_id in self.ssd.tier)

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> StoreReservation | PartReservation:
        """Room for the leading blocks of an offer that hang together and fit; blocks that are here need none.

        All blocks of an offer are whole, or all are of the same heads.
        """
        offered = await self._take_in(headers, epoch)
        if offered and offered[0].header.part is not None:
            return self._reserve_parts(offered)
        return self._reserve_whole(offered, int(self._clock()))

    async def reserve_copies(self, headers: Sequence[bytes], created_s: int) -> StoreReservation:
        """Room for blocks that were made earlier, in seconds since 1970, and have been whole elsewhere."""
        offered = await self._take_in(headers, 0)
        whole = [block for block in offered if block.header.part is None]
        self.totals.rejected(len(offered) - len(whole), "invalid")
        return self._reserve_whole(whole, min(created_s, int(self._clock())))

    async def _take_in(self, headers: Sequence[bytes], epoch: int) -> list[Offered]:
        """What of an offer may be kept at all; its parent is in RAM then, if it is here."""
        current = epoch in (0, self.epoch)
        offered = self._decode(headers) if current else []
        self.totals.rejected(len(headers) - len(offered), "invalid" if current else "epoch")
        if any(self.generations.is_dead(block.header.owner_digest) for block in offered):
            self.totals.rejected(len(offered), CLEARED)
            return []
        if self.ssd is not None and offered:
            await self.ssd.prepare(None if offered[0].header.starts_chain else offered[0].header.parent_id)
        return offered

    def _reserve_whole(self, offered: Sequence[Offered], created_s: int) -> StoreReservation:
        ids = [block.header.block_id for block in offered]
        num_held = next((i for i, block_id in enumerate(ids) if block_id not in self._ram), len(ids))
        reservation = StoreReservation(
            self._ram, offered, num_held, self._allocate, self._kept, self._overtaken, created_s=created_s
        )
        self.totals.rejected(len(offered) - num_held - len(reservation.buffers), "no parent or no room")
        return reservation

    def _reserve_parts(self, offered: Sequence[Offered]) -> PartReservation:
        now_s = asyncio.get_running_loop().time()
        self.partials.expire(now_s)
        reservation = PartReservation(
            self._ram,
            self.partials,
            offered,
            self._kept,
            self._overtaken,
            self.totals.rejected,
            now_s=now_s,
            created_s=int(self._clock()),
        )
        self._expire_later()
        return reservation

    def _expire_later(self) -> None:
        """A timer that drops what stays incomplete, while there is anything."""
        due_s = self.partials.next_expiry_s
        if self._expiry is None and due_s is not None:
            self._expiry = asyncio.get_running_loop().call_at(due_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self.partials.expire(asyncio.get_running_loop().time())
        self._expire_later()

    def drop_dead(self) -> tuple[list[bytes], list[bytes]]:
        """Drop the blocks of dead owners. Returns the owners, one for each block, of those in RAM and on the SSD."""
        # Blocks are many and owners few.
        is_dead = functools.cache(self.generations.is_dead)
        self.partials.clear(is_dead)
        gone = self._ram.clear(is_dead)
        self.totals.cleared(len(gone), sum(entry.slot.num_bytes for entry in gone))
        below = self.ssd.cleared(gone) if self.ssd is not None else set()
        self._announcements.remove([entry.block_id for entry in gone if entry.block_id not in below])
        below_owners = self.ssd.tier.drop_dead(is_dead) if self.ssd is not None else []
        return [entry.owner for entry in gone], below_owners

    def _served(self, ids: Sequence[BlockId], request: PullRequest) -> None:
        if self.on_served is not None and ids:
            self.on_served(ids, request.same_host, self.totals.open_leases)

    def _lend(self, request: PullRequest, ram: list[Entry], ssd: list[Entry], stop: str) -> StoreLease:
        self.totals.leased(len(ram), len(ssd), len(request.ids) - len(ram) - len(ssd))
        return StoreLease(self._ram, self.totals, request, ram, ssd, stop)

    def _allocate(self, num_bytes: int, owner: bytes) -> Slot | None:
        slot, gone = self._ram.allocate(num_bytes, owner)
        if gone:
            self.totals.evicted(len(gone), sum(entry.slot.num_bytes for entry in gone))
            below = self.ssd.evicted(gone) if self.ssd is not None else set()
            self._announcements.remove([entry.block_id for entry in gone if entry.block_id not in below])
            self._announcements.add([entry.block_id for entry in gone if entry.block_id in below], Tier.SSD)
        return slot

    def _kept(self, blocks: Sequence[Offered], faults: Sequence[str]) -> None:
        if blocks:
            ids = [block.header.block_id for block in blocks]
            for block_id in ids if self.partials else ():
                self.partials.superseded(block_id)
            self.totals.kept(len(blocks), sum(block.header.payload_bytes for block in blocks))
            self._announcements.add(ids, Tier.RAM)
            if self.ssd is not None:
                self.ssd.spiller.offer(ids)
        for reason in faults:
            self.totals.failed_verification(reason)
            _log.warning("an offered block failed verification", reason=reason)

    def _overtaken(self, blocks: Sequence[Offered]) -> bool:
        """Whether the owner of arrived blocks was cleared while they were under way."""
        if not any(self.generations.is_dead(block.header.owner_digest) for block in blocks):
            return False
        self.totals.rejected(len(blocks), CLEARED)
        return True

    def _promoted(self, entries: Sequence[SsdEntry]) -> None:
        for entry in entries if self.partials else ():
            self.partials.superseded(entry.block_id)
        self.totals.held(len(entries), sum(entry.payload_bytes for entry in entries))
        self._announcements.add([entry.block_id for entry in entries], Tier.RAM)

    def _lost(self, ids: Sequence[BlockId]) -> None:
        """The SSD no longer has these."""
        self._announcements.remove([block_id for block_id in ids if block_id not in self._ram])

    def _decode(self, headers: Sequence[bytes]) -> list[Offered]:
        offered: list[Offered] = []
        for encoded in headers:
            try:
                header = decode_header(encoded)
                # Raises for a size that does not divide into heads.
                _ = header.covered_bytes
                if offered and header.part != offered[0].header.part:
                    raise BlockInvalid("heads")
            except BlockInvalid as error:
                self.totals.failed_verification(error.reason)
                _log.warning("an offered block has a bad header", reason=error.reason)
                break
            offered.append(Offered(header, encoded))
        return offered
