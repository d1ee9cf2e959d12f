"""The SSD tier on the event loop: index and log together, reads and writes in threads, and the switch to off.

One write at a time; reads run beside it. A segment that is being read is not removed. Any OSError ends the tier: its
blocks are given up, the node goes on from RAM, and a restart tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.common.blocks import BlockId
from services.kvstore.metrics import SsdTotals
from services.kvstore.ssd_frames import FRAME_BYTES, frame_bytes, frames, places_bytes
from services.kvstore.ssd_index import SsdEntry, SsdIndex
from services.kvstore.ssd_keys import TooManyOwners
from services.kvstore.ssd_log import NewBlock, Place, SegmentLog, Wanted
from services.kvstore.ssd_pins import SegmentPins
from services.kvstore.ssd_quota import Quota, Spill
from services.kvstore.ssd_recovery import recover

READ_THREADS = 4
# Longest wait for the reads of a segment that must go.
_READS_END_S = 10.0
# Most of a new segment that copies of old blocks may take.
_COPIED_FRACTION = 0.5
# Most of a segment that one frame takes: with the copies and the padding it still fits.
_FRAME_FRACTION = 0.375
# A read or a write that takes longer ends the tier.
_READ_TIMEOUT_S, _WRITE_TIMEOUT_S = 2.0, 30.0
# Longest that destroying keys may take, the wait for a write before it included.
_DESTROY_TIMEOUT_S = 10.0
_CLOSED = "closed"
# Owners without blocks that lose their keys at once when others need the slots.
_IDLE_OWNERS = 32
_log = structlog.get_logger()
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class SsdStatistics:
    """Counts of one moment. state: "on", "off", or why it was switched off."""

    state: str
    num_blocks: int
    num_bytes: int
    used_bytes: int
    capacity_bytes: int
    num_segments: int
    num_owners: int
    is_encrypted: bool


class SsdTier:
    """`lost` is told which blocks are no longer here, descendants first."""

    def __init__(
        self,
        log: SegmentLog,
        *,
        lost: Callable[[Sequence[BlockId]], None],
        owner_bytes: int = 0,
        max_age_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """owner_bytes: most payload of one tenant, 0: no limit. max_age_s: 0: no limit."""
        self.totals = SsdTotals()
        self.max_age_s = max_age_s
        self._log = log
        self._index = SsdIndex()
        self._lost = lost
        self._quota = Quota(owner_bytes)
        self._clock = clock
        self._off = ""
        self._pins = SegmentPins()
        self._writing = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, "ssd-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, "ssd-read")

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._index

    @property
    def is_on(self) -> bool:
        """Whether anything can be here."""
        return not self._off

    def statistics(self) -> SsdStatistics:
        """A snapshot."""
        return SsdStatistics(
            self._off or "on",
            len(self._index),
            self._index.num_bytes,
            self._log.used_bytes,
            self._log.limit_bytes,
            len(self._log.segments),
            len(self._log.keys),
            self._log.encrypts,
        )

    async def start(self) -> list[BlockId]:
        """Take up what earlier runs left. Returns the blocks, parents first."""
        started_s = time.monotonic()
        try:
            scanned = await self._in_writer(self._log.scan)
            index, ids, dropped = await self._in_writer(
                lambda: recover(scanned.places, self._log.keys, oldest_s=self._oldest_s())
            )
        except OSError as error:
            self.switch_off(error)
            return []
        self._index = index
        self._quota.shrink(index, self._log.keys.owners)
        ids = [block_id for block_id in ids if block_id in index]
        self.totals.held(len(ids), index.num_bytes)
        self.totals.open_s = time.monotonic() - started_s
        _log.info(
            "ssd tier is open",
            blocks=len(ids),
            payload_bytes=index.num_bytes,
            dropped_records=dropped,
            torn_segments=scanned.torn_segments,
            duration_s=round(self.totals.open_s, 3),
        )
        return ids

    @property
    def frame_bytes(self) -> int:
        """Most that the blocks of one write may take, each counted by `frame_share`."""
        return min(FRAME_BYTES, int(self._log.segment_bytes * _FRAME_FRACTION))

    def run(self, ids: Sequence[BlockId], max_bytes: int) -> list[SsdEntry]:
        """The leading blocks of `ids` that are here and not too old."""
        entries = self._index.run(ids, max_bytes)
        oldest_s = self._oldest_s()
        young = next((i for i, entry in enumerate(entries) if entry.place.record.created_s < oldest_s), len(entries))
        return entries[:young]

    def path_to(self, block_id: BlockId, until: Callable[[BlockId], bool]) -> list[SsdEntry]:
        """The block and its ancestors, parents first, down from the first one for which `until` does not hold."""
        path: list[SsdEntry] = []
        step = self._index.get(block_id)
        while step is not None and not until(step.block_id):
            path.append(step)
            step = self._index.get(step.parent_id) if step.parent_id is not None else None
        return path[::-1]

    def mark_hot(self, block_id: BlockId) -> None:
        """A block that is here was wanted again."""
        if (entry := self._index.get(block_id)) is not None:
            entry.hot = True

    async def read(self, entries: Sequence[SsdEntry], buffers: Sequence[memoryview]) -> int:
        """Read and verify blocks. Returns how many leading ones are good; a bad one leaves the tier.

        Not to be cancelled while buffers are in use: the caller shields it.
        """
        here = [self._index.get(entry.block_id) is entry for entry in entries]
        num_here = here.index(False) if False in here else len(here)
        entries, buffers = entries[:num_here], buffers[:num_here]
        wanted = [Wanted(entry.place, entry.owner, buffer) for entry, buffer in zip(entries, buffers, strict=True)]
        step = max(1, -(-len(wanted) // READ_THREADS))
        shares = [wanted[first : first + step] for first in range(0, len(wanted), step)]
        loop = asyncio.get_running_loop()
        with self._pins.held([one.place.segment for one in wanted]), self._watched(_READ_TIMEOUT_S, "read"):
            jobs = [loop.run_in_executor(self._readers, _read, self._log, share) for share in shares]
            # Each ends by itself: memory is in use until the last one has.
            results = [fault for faults in await asyncio.gather(*jobs) for fault in faults]
        return self._account(entries, results)

    async def write(self, spills: Sequence[Spill]) -> int:
        """Store blocks that fit in a frame, parents first. Returns how many are on the SSD now."""
        async with self._writing:
            oldest_s = self._oldest_s()
            new = [one for one in spills if one.block_id not in self._index and one.is_wanted()]
            young = [one for one in new if one.block.created_s >= oldest_s]
            wanted = self._quota.make_room(self._index, young, self._drop)
            if self._off or not wanted:
                return 0
            started_s = time.monotonic()
            try:
                with self._watched(_WRITE_TIMEOUT_S, "write"):
                    places = await self._append([spill.block for spill in wanted])
            except OSError as error:
                self.switch_off(error)
                return 0
            except TooManyOwners as error:
                _log.warning("blocks are not spilled", error=str(error))
                return 0
            if self._off:
                return 0
            # What was cleared meanwhile does not come to be here.
            stored = [
                spill
                for spill, place in zip(wanted, places, strict=True)
                if spill.is_wanted() and self._insert(spill, place)
            ]
            num_bytes = sum(len(spill.block.payload) for spill in stored)
            self.totals.spilled(len(stored), num_bytes, time.monotonic() - started_s)
            return len(stored)

    async def expire(self) -> None:
        """Drop blocks that are too old, and segments without any block."""
        oldest_s = self._oldest_s()
        for segment in self._log.segments if self.is_on else ():
            self._drop([e.block_id for e in self._index.in_segment(segment) if e.place.record.created_s < oldest_s])
            await asyncio.sleep(0)
        async with self._writing:
            for segment in self._log.segments[:-1] if self.is_on else ():
                if not self._index.in_segment(segment):
                    await self._guarded(self._remove_segment(segment))

    def drop_dead(self, is_dead: Callable[[bytes], bool]) -> list[bytes]:
        """Drop the blocks of dead owners, whose keys are still there. Returns the owners, one for each block."""
        dead = self._index.of_dead(is_dead)
        self.totals.cleared(len(self._drop([entry.block_id for entry in dead])))
        return [entry.owner for entry in dead]

    async def destroy_keys(self, is_dead: Callable[[bytes], bool]) -> list[bytes]:
        """Destroy the keys of dead owners: nobody can read what was under them. Returns the owners.

        Also where the tier was switched off: a restart would find the blocks. Raises OSError, TimeoutError included;
        then calling it again may help.
        """
        async with asyncio.timeout(_DESTROY_TIMEOUT_S), self._writing:
            if self._off == _CLOSED:
                raise OSError("the ssd tier is closed")
            dead = [owner for owner in self._log.keys.owners if is_dead(owner)]
            for owner in dead:
                try:
                    await self._in_writer(lambda owner=owner: self._log.keys.destroy(owner))  # type: ignore[misc]
                except OSError as error:
                    self.switch_off(error)
                    raise
            return dead

    async def close(self) -> None:
        """Wait for what runs and close the files; what was stored stays."""
        async with self._writing:
            self._off = _CLOSED
            await asyncio.to_thread(self._shut_down)

    def check(self) -> None:
        """Raises AssertionError when the parts disagree; for tests."""
        self._index.check()
        assert self._log.used_bytes <= self._log.limit_bytes
        assert not self._pins

    async def _append(self, blocks: list[NewBlock]) -> list[Place]:
        num_bytes = frame_bytes(blocks)
        while self._log.room_bytes < num_bytes:
            await self._next_segment()
        await self._make_room_for_keys({block.owner for block in blocks})
        return await self._in_writer(lambda: self._log.append(blocks))

    async def _make_room_for_keys(self, owners: set[bytes]) -> None:
        """Take keys from owners without blocks, else from those that have theirs the longest."""
        keys = self._log.keys
        if keys.num_free >= len(owners.difference(keys.owners)):
            return
        others = [owner for owner in keys.owners if owner not in owners]
        idle = [owner for owner in others if not self._index.owner_bytes(owner)]
        for owner in idle[:_IDLE_OWNERS] or others[: len(owners)]:
            self._drop(self._index.owned(owner))
            await self._in_writer(lambda owner=owner: keys.destroy(owner))  # type: ignore[misc]

    async def _next_segment(self) -> None:
        """Open a segment; when that leaves no space for a further one, empty and remove the oldest."""
        while not self._log.may_open:
            await self._remove_segment(self._log.segments[0])
        await self._in_writer(self._log.open_segment)
        while not self._log.may_open and len(self._log.segments) > 1:
            oldest = self._log.segments[0]
            await self._copy_forward(self._index.keepers(oldest, int(self._log.segment_bytes * _COPIED_FRACTION)))
            await self._remove_segment(oldest)

    async def _copy_forward(self, keepers: list[SsdEntry]) -> None:
        for places in frames([entry.place for entry in keepers]):
            ids = [entry.block_id for entry in keepers if entry.place in places]
            if self._log.room_bytes < places_bytes(places):
                return
            moved = await self._in_writer(lambda places=places: self._log.copy(places))  # type: ignore[misc]
            for block_id, old, new in zip(ids, places, moved, strict=True):
                self._index.move(block_id, old, new)
            self.totals.copied(len(moved))

    async def _remove_segment(self, segment: int) -> None:
        self.totals.reclaimed(len(self._drop([entry.block_id for entry in self._index.in_segment(segment)])))
        await self._pins.released(segment, _READS_END_S)
        await self._in_writer(lambda: self._log.remove(segment))

    def _insert(self, spill: Spill, place: Place) -> bool:
        block = spill.block
        return self._index.insert(SsdEntry(spill.block_id, spill.parent_id, block.owner, len(block.payload), place))

    def _account(self, entries: Sequence[SsdEntry], results: Sequence[str | OSError]) -> int:
        good = 0
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, OSError):
                self.switch_off(result)
            elif result:
                self.totals.failed_verification(result)
                _log.warning("a block on the ssd failed verification", reason=result)
                self._drop([entry.block_id] if self._index.get(entry.block_id) is entry else [])
        for entry, result in zip(entries, results, strict=True):
            # What was cleared meanwhile is not handed out.
            if result or self._index.get(entry.block_id) is not entry:
                break
            good += 1
        self.totals.was_read(good, sum(entry.payload_bytes for entry in entries[:good]))
        return good

    def _drop(self, ids: Sequence[BlockId]) -> list[BlockId]:
        before = self._index.num_bytes
        gone = self._index.remove(ids)
        if gone:
            self.totals.held(-len(gone), self._index.num_bytes - before)
            self._lost(gone)
        return gone

    def _oldest_s(self) -> int:
        return int(self._clock() - self.max_age_s) if self.max_age_s else 0

    def switch_off(self, error: Exception) -> None:
        """End the tier: nothing is here any more, and nothing is written."""
        if self._off:
            return
        self._off = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        before = self._index.num_bytes
        gone = self._index.clear()
        self.totals.held(-len(gone), -before)
        self.totals.switched_off()
        _log.error("ssd tier is switched off until the next start", error=self._off, given_up_blocks=len(gone))
        self._lost(gone)

    @contextlib.contextmanager
    def _watched(self, timeout_s: float, what: str) -> Iterator[None]:
        """Switch off when the body takes too long; the body goes on."""
        late = TimeoutError(f"a {what} takes longer than {timeout_s:g} s")
        watchdog = asyncio.get_running_loop().call_later(timeout_s, self.switch_off, late)
        try:
            yield
        finally:
            watchdog.cancel()

    async def _guarded(self, work: Awaitable[object]) -> None:
        try:
            await work
        except OSError as error:
            self.switch_off(error)

    async def _in_writer(self, work: Callable[[], _R]) -> _R:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writer, work))

    def _shut_down(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self._log.close()


def _read(log: SegmentLog, wanted: Sequence[Wanted]) -> Sequence[str | OSError]:
    try:
        return log.read(wanted)
    except OSError as error:
        return [error] * len(wanted)
