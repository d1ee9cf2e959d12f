"""Room for the blocks of an offer, from the push to their insertion in RAM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import BlockHeader, verify_payload
from services.kvstore.arena import Slot
from services.kvstore.ram_tier import Entry, RamTier
from services.kvstore.ssd_loader import Allocate

# Checksums of this much run on the event loop (about a quarter of a millisecond); more goes to a thread.
_INLINE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Offered:
    """A block of a push, or a part of one, as its header describes it."""

    header: BlockHeader
    encoded: bytes


# Told which blocks are new in RAM, and what was wrong with others.
Kept = Callable[[Sequence[Offered], Sequence[str]], None]
# Whether the owner of arrived blocks was cleared while they were under way.
Overtaken = Callable[[Sequence[Offered]], bool]


async def find_faults(offered: Sequence[Offered], buffers: Sequence[memoryview]) -> list[str]:
    """What is wrong with the bytes that came for each block or part, "" for nothing."""

    def check() -> list[str]:
        return [_fault(block, buffer) for block, buffer in zip(offered, buffers, strict=True)]

    if sum(len(buffer) for buffer in buffers) <= _INLINE_BYTES:
        return check()
    return await asyncio.to_thread(check)


def hold_anchor(ram: RamTier, offered: Sequence[Offered], num_held: int) -> Entry | None:
    """The block in RAM that the first new block of an offer hangs on, lent; None when there is none."""
    if num_held:
        return ram.hold(offered[num_held - 1].header.block_id)
    if offered and not offered[0].header.starts_chain:
        return ram.hold(offered[0].header.parent_id)
    return None


class StoreReservation:
    """Slots for the new blocks of an offer. What they hang on is lent to the reservation, so it stays meanwhile."""

    def __init__(
        self,
        ram: RamTier,
        offered: Sequence[Offered],
        num_held: int,
        allocate: Allocate,
        kept: Kept,
        overtaken: Overtaken,
        *,
        created_s: int,
    ) -> None:
        self.num_held = num_held
        self._overtaken = overtaken
        self._created_s = created_s
        self._ram = ram
        self._kept = kept
        self._new: list[tuple[Offered, Slot]] = []
        self._anchor = hold_anchor(ram, offered, num_held)
        self._reserve(offered[num_held:], allocate)
        self.buffers = [ram.memory(slot) for _, slot in self._new]

    async def commit(self) -> int:
        """As `Reservation.commit`."""
        try:
            faults = await find_faults([block for block, _ in self._new], self.buffers)
            if self._overtaken([block for block, _ in self._new]):
                return 0
            return self.num_held + self._insert(faults)
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
