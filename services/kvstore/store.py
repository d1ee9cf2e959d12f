"""The node's blocks as a source and a sink of transfers, and the announcements that follow from them.

RAM and SSD are each prefix-closed, so a chain is a prefix in RAM and a continuation on the SSD. Blocks are lent from
RAM only: what is wanted from the SSD is brought there first. A block is announced for the faster tier that has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.common.generations import Generations
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import BlockHeader, decode_header, verify_payload
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_MISSING,
    PullRequest,
)
from services.kvstore.arena import Slot
from services.kvstore.lending import StoreLease, note_read
from services.kvstore.metrics import Totals
from services.kvstore.ram_tier import Entry, RamStatistics, RamTier
from services.kvstore.ssd_index import SsdEntry
from services.kvstore.ssd_layer import SsdLayer
from services.kvstore.ssd_loader import Allocate
from services.kvstore.ssd_log import SegmentLog
from services.kvstore.ssd_tier import SsdTier

# Checksums of this much run on the event loop (about a quarter of a millisecond); more goes to a thread.
_INLINE_BYTES = 2 * 2**20
# Why blocks of an owner that has been cleared since are refused.
CLEARED = "cleared"
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Offered:
    """A block of a push, as its header describes it."""

    header: BlockHeader
    encoded: bytes


Kept = Callable[[Sequence[Offered], Sequence[str]], None]


# Told of every pull: the blocks, whether the puller is on this host, and how many pulls are served now.
OnServed = Callable[[Sequence[BlockId], bool, int], None]


class Announcements(Protocol):
    """The part of the announcer that the store uses."""

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None: ...

    def remove(self, ids: Sequence[BlockId]) -> None: ...


class Store:
    """BlockSource and BlockSink over both tiers. Everything runs on the event loop except checksums and the disk."""

    def __init__(
        self, ram: RamTier, announcements: Announcements, *, epoch: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.epoch = epoch
        self.totals = Totals()
        # Blocks of dead owners are taken neither from an offer nor from one that is under way.
        self.generations = Generations()
        self.ssd: SsdLayer | None = None
        self.on_served: OnServed | None = None
        self._ram = ram
        self._announcements = announcements
        self._clock = clock

    def statistics(self) -> RamStatistics:
        """Of the RAM tier."""
        return self._ram.statistics()

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
        self._served(entries, request)
        return self._lend(request, entries[:num_ram], entries[num_ram:], stop)

    def was_read(self, request: PullRequest, duration_s: float) -> None:
        """A peer on this host has read these blocks in RAM by the directory."""
        entries = note_read(self._ram, self.totals, request, duration_s)
        self._served(entries, request)
        if self.ssd is not None:
            self.ssd.used(entries)

    def holds(self, block_id: BlockId) -> bool:
        """Whether a block is in either tier."""
        return block_id in self._ram or (self.ssd is not None and block_id in self.ssd.tier)

    async def reserve(self, headers: Sequence[bytes], epoch: int, *, created_s: int | None = None) -> StoreReservation:
        """Room for the leading blocks of an offer that hang together and fit; blocks that are here need none.

        created_s: when the blocks were made, in seconds since 1970, if it was not just now.
        """
        current = epoch in (0, self.epoch)
        offered = self._decode(headers) if current else []
        self.totals.rejected(len(headers) - len(offered), "invalid" if current else "epoch")
        if any(self.generations.is_dead(block.header.owner_digest) for block in offered):
            self.totals.rejected(len(offered), CLEARED)
            offered = []
        if self.ssd is not None and offered:
            await self.ssd.prepare(None if offered[0].header.starts_chain else offered[0].header.parent_id)
        ids = [block.header.block_id for block in offered]
        num_held = next((i for i, block_id in enumerate(ids) if block_id not in self._ram), len(ids))
        reservation = StoreReservation(
            self._ram,
            offered,
            num_held,
            self._allocate,
            self._kept,
            self._overtaken,
            created_s=int(self._clock()) if created_s is None else created_s,
        )
        self.totals.rejected(len(offered) - num_held - len(reservation.buffers), "no parent or no room")
        return reservation

    def drop_older(self, owner: bytes) -> tuple[int, int]:
        """Drop the blocks of earlier generations of an owner's tenant; how many went from RAM and from the SSD."""
        gone = self._ram.clear_older(owner)
        self.totals.cleared(len(gone), sum(entry.slot.num_bytes for entry in gone))
        below = self.ssd.cleared(gone) if self.ssd is not None else set()
        self._announcements.remove([entry.block_id for entry in gone if entry.block_id not in below])
        return len(gone), self.ssd.tier.drop_older(owner) if self.ssd is not None else 0

    def _served(self, entries: Sequence[Entry], request: PullRequest) -> None:
        if self.on_served is not None and entries:
            self.on_served([entry.block_id for entry in entries], request.same_host, self.totals.open_leases)

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
                if header.payload_bytes % len(header.checksums) or not header.payload_bytes:
                    raise BlockInvalid("size")
            except BlockInvalid as error:
                self.totals.failed_verification(error.reason)
                _log.warning("an offered block has a bad header", reason=error.reason)
                break
            offered.append(Offered(header, encoded))
        return offered


class StoreReservation:
    """Slots for the new blocks of an offer. What they hang on is lent to the reservation, so it stays meanwhile."""

    def __init__(
        self,
        ram: RamTier,
        offered: Sequence[Offered],
        num_held: int,
        allocate: Allocate,
        kept: Kept,
        overtaken: Callable[[Sequence[Offered]], bool],
        *,
        created_s: int,
    ) -> None:
        self.num_held = num_held
        self._overtaken = overtaken
        self._created_s = created_s
        self._ram = ram
        self._kept = kept
        self._new: list[tuple[Offered, Slot]] = []
        self._anchor = self._hold_anchor(offered, num_held)
        self._reserve(offered[num_held:], allocate)
        self.buffers = [ram.memory(slot) for _, slot in self._new]

    async def commit(self) -> int:
        """As `Reservation.commit`."""
        try:
            reasons = await self._verify()
            if self._overtaken([block for block, _ in self._new]):
                return 0
            return self.num_held + self._insert(reasons)
        finally:
            self.abandon()

    def keep_first(self, count: int) -> None:
        """Only the first `count` buffers were filled, and nobody writes the others any more."""
        for block, slot in self._new[count:]:
            self._ram.discard(slot, block.header.owner_digest)
        del self._new[count:], self.buffers[count:]

    def abandon(self) -> None:
        """As `Reservation.abandon`; also gives back the slots that `commit` did not use."""
        for block, slot in self._new:
            self._ram.discard(slot, block.header.owner_digest)
        self._new.clear()
        if self._anchor is not None:
            self._ram.release([self._anchor])
            self._anchor = None

    def _hold_anchor(self, offered: Sequence[Offered], num_held: int) -> Entry | None:
        if num_held:
            return self._ram.hold(offered[num_held - 1].header.block_id)
        if offered and not offered[0].header.starts_chain:
            return self._ram.hold(offered[0].header.parent_id)
        return None

    def _reserve(self, offered: Sequence[Offered], allocate: Allocate) -> None:
        parent_id = self._anchor.block_id if self._anchor is not None else None
        for block in offered:
            expected = None if block.header.starts_chain else block.header.parent_id
            if (
                expected != parent_id
                or (slot := allocate(block.header.payload_bytes, block.header.owner_digest)) is None
            ):
                return
            self._new.append((block, slot))
            parent_id = block.header.block_id

    async def _verify(self) -> list[str]:
        """What is wrong with each block, "" for nothing."""
        if sum(len(buffer) for buffer in self.buffers) <= _INLINE_BYTES:
            return self._verify_all()
        return await asyncio.to_thread(self._verify_all)

    def _verify_all(self) -> list[str]:
        return [_fault(block, buffer) for (block, _), buffer in zip(self._new, self.buffers, strict=True)]

    def _insert(self, faults: list[str]) -> int:
        """Insert up to the first bad block. Returns how many are held."""
        added: list[Offered] = []
        held = 0
        for (block, slot), fault in zip(list(self._new), faults, strict=True):
            header = block.header
            if fault:
                break
            parent_id = None if header.starts_chain else header.parent_id
            if self._ram.insert(
                header.block_id,
                parent_id,
                slot,
                block.encoded,
                owner=header.owner_digest,
                created_s=self._created_s,
            ):
                added.append(block)
                self._new.remove((block, slot))
            elif header.block_id not in self._ram:
                break
            held += 1
        self._kept(added, [fault for fault in faults if fault])
        return held


def _fault(block: Offered, buffer: memoryview) -> str:
    try:
        verify_payload(block.header, buffer)
    except BlockInvalid as error:
        return error.reason
    return ""
