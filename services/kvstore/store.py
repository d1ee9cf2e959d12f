"""The node's blocks as a source and a sink of transfers, and the announcements that follow from them.

A tier below RAM would sit here: `lease` would look there after RAM, `_allocate` would hand blocks down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from opentelemetry import propagate, trace

from services.common.announcements import Tier
from services.common.blocks import BlockId
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import BlockHeader, decode_header, verify_payload
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_MISSING,
    HeldBlock,
    PullRequest,
)
from services.kvstore.arena import Slot
from services.kvstore.metrics import Totals
from services.kvstore.ram_tier import Entry, RamStatistics, RamTier

# Checksums of this much run on the event loop (about a quarter of a millisecond); more goes to a thread.
_INLINE_BYTES = 2 * 2**20
_log = structlog.get_logger()
_tracer = trace.get_tracer("kvmesh.kvstore")


@dataclass(frozen=True, slots=True)
class Offered:
    """A block of a push, as its header describes it."""

    header: BlockHeader
    encoded: bytes


Allocate = Callable[[int], Slot | None]
Kept = Callable[[Sequence[Offered], Sequence[str]], None]


class Announcements(Protocol):
    """The part of the announcer that the store uses."""

    def add(self, ids: Sequence[BlockId], tier: Tier) -> None: ...

    def remove(self, ids: Sequence[BlockId]) -> None: ...


class Store:
    """BlockSource and BlockSink over the RAM tier. Everything here runs on the event loop except checksums."""

    def __init__(self, ram: RamTier, announcements: Announcements, *, epoch: int) -> None:
        self.epoch = epoch
        self.totals = Totals()
        self._ram = ram
        self._announcements = announcements

    def statistics(self) -> RamStatistics:
        """Of the RAM tier."""
        return self._ram.statistics()

    async def lease(self, request: PullRequest) -> StoreLease:
        """The leading blocks that are here; none for another epoch."""
        wrong_epoch = request.epoch not in (0, self.epoch)
        entries = [] if wrong_epoch else self._ram.lease(request.ids)
        self.totals.leased(len(entries), len(request.ids) - len(entries))
        short = STOP_MISSING if len(entries) < len(request.ids) else STOP_COMPLETE
        return StoreLease(self._ram, self.totals, request, entries, STOP_EPOCH if wrong_epoch else short)

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> StoreReservation:
        """Room for the leading blocks of an offer that hang together and fit; blocks that are here need none."""
        current = epoch in (0, self.epoch)
        offered = self._decode(headers) if current else []
        self.totals.rejected(len(headers) - len(offered), "invalid" if current else "epoch")
        ids = [block.header.block_id for block in offered]
        num_held = next((i for i, block_id in enumerate(ids) if block_id not in self._ram), len(ids))
        reservation = StoreReservation(self._ram, offered, num_held, self._allocate, self._kept)
        self.totals.rejected(len(offered) - num_held - len(reservation.buffers), "no parent or no room")
        return reservation

    def _allocate(self, num_bytes: int) -> Slot | None:
        before = self._ram.statistics().num_bytes
        slot, gone = self._ram.allocate(num_bytes)
        if gone:
            self.totals.evicted(len(gone), before - self._ram.statistics().num_bytes)
            self._announcements.remove(gone)
        return slot

    def _kept(self, blocks: Sequence[Offered], faults: Sequence[str]) -> None:
        if blocks:
            self.totals.kept(len(blocks), sum(block.header.payload_bytes for block in blocks))
            self._announcements.add([block.header.block_id for block in blocks], Tier.RAM)
        for reason in faults:
            self.totals.failed_verification(reason)
            _log.warning("an offered block failed verification", reason=reason)

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


class StoreLease:
    """Blocks lent to one pull; a span under the puller's trace for as long."""

    def __init__(self, ram: RamTier, totals: Totals, request: PullRequest, entries: list[Entry], stop: str) -> None:
        self.stop = stop
        self.blocks = [HeldBlock(entry.header, ram.view(entry), "ram") for entry in entries]
        self._ram = ram
        self._totals = totals
        self._entries = entries
        self._request = request
        self._started_s = time.monotonic()
        context = propagate.extract({"traceparent": request.traceparent}) if request.traceparent else None
        self._span = _tracer.start_span("kvstore.pull", context, kind=trace.SpanKind.SERVER)

    def release(self, num_sent: int, stop: str) -> None:
        """As `BlockLease.release`."""
        self._ram.release(self._entries)
        num_bytes = sum(len(block.payload) for block in self.blocks[:num_sent])
        duration_s = time.monotonic() - self._started_s
        self._totals.released(num_bytes, duration_s)
        asked = len(self._request.ids)
        self._span.set_attributes(
            {"kvmesh.asked_blocks": asked, "kvmesh.sent_blocks": num_sent, "kvmesh.sent_bytes": num_bytes}
        )
        with trace.use_span(self._span, end_on_exit=True):
            _log.info(
                "pull served",
                request_id=self._request.request_id,
                asked_blocks=asked,
                sent_blocks=num_sent,
                sent_bytes=num_bytes,
                stop=stop,
                duration_s=round(duration_s, 6),
            )


class StoreReservation:
    """Slots for the new blocks of an offer. What they hang on is lent to the reservation, so it stays meanwhile."""

    def __init__(self, ram: RamTier, offered: Sequence[Offered], num_held: int, allocate: Allocate, kept: Kept) -> None:
        self.num_held = num_held
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
            return self.num_held + self._insert(reasons)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """As `Reservation.abandon`; also gives back the slots that `commit` did not use."""
        for _, slot in self._new:
            self._ram.discard(slot)
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
            if expected != parent_id or (slot := allocate(block.header.payload_bytes)) is None:
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
            if self._ram.insert(
                header.block_id, None if header.starts_chain else header.parent_id, slot, block.encoded
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
