"""The append-only log over segment files: append a frame, read a record, open, scan and remove segments.

One thread at a time appends, opens and removes; reads may come from others at the same time. A frame is durable when
`append` returns and cannot be seen by a restart before that. The space of all files never exceeds the limit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag

from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import decode_header, verify_payload
from services.kvstore.ssd_files import WRITE_BYTES, PageBuffer, SegmentDirectory, SegmentFile, scratch
from services.kvstore.ssd_format import (
    NONCE_BYTES,
    PAGE_BYTES,
    TAG_BYTES,
    Frame,
    NotAFrame,
    Record,
    decode_frame_header,
    encode_frame_header,
    frame_header_size,
    frame_layout,
    padded,
)
from services.kvstore.ssd_keys import KEY_FILE_BYTES, OwnerKeys

# Most that is read at once.
READ_BYTES = 2 * 2**20
BEFORE_DATA, MID_RECORD, BEFORE_COMMIT, MID_COMMIT = "before data", "mid-record", "before commit", "mid-commit"
BEFORE_COPY, BEFORE_REMOVE, AFTER_REMOVE = "before copy", "before remove", "after remove"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies."""

    segment: int
    offset: int
    record: Record


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be stored. The payload must not change until `append` returns."""

    header: bytes
    owner: bytes
    created_s: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be read into memory of exactly its size."""

    place: Place
    owner: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a restart found: places in the order of writing, and segments that ended in something uncommitted."""

    places: list[Place]
    torn_segments: int


def stored_bytes(payload_bytes: int) -> int:
    """Most that a payload takes on the disk beside its frame header."""
    return padded(payload_bytes + TAG_BYTES)


def segment_space(num_bytes: int) -> int:
    """What a segment takes on the disk: a file system may need a page beside it to note where its parts lie."""
    return num_bytes + PAGE_BYTES


class SegmentLog:
    """Takes over an open directory; `scan` comes first."""

    def __init__(
        self,
        directory: SegmentDirectory,
        keys: OwnerKeys,
        *,
        limit_bytes: int,
        segment_bytes: int,
        encrypt: bool = True,
        reached: Callable[[str], None] = lambda _: None,
        chunk_bytes: int = WRITE_BYTES,
    ) -> None:
        """reached: told each step of the write path as it comes, for fault injection."""
        self.keys = keys
        self.segment_bytes = segment_bytes
        self.limit_bytes = limit_bytes - KEY_FILE_BYTES
        self._directory = directory
        self.encrypts = encrypt
        self._reached = reached
        self._chunk_bytes = chunk_bytes
        self._segments: dict[int, SegmentFile] = {}
        self._used_bytes = 0
        self._active: SegmentFile | None = None
        self._position = 0
        self._last_sequence = 0
        self._frame = PageBuffer()
        self._behind = ThreadPoolExecutor(1, "ssd-behind")

    @property
    def segments(self) -> list[int]:
        """Sequence numbers, oldest first."""
        return sorted(self._segments)

    @property
    def used_bytes(self) -> int:
        """Space that the segment files take."""
        return self._used_bytes

    @property
    def room_bytes(self) -> int:
        """Space left in the segment that is written to."""
        return self._active.header.num_bytes - self._position if self._active is not None else 0

    @property
    def may_open(self) -> bool:
        """Whether one more segment is within the limit."""
        return self._used_bytes + segment_space(self.segment_bytes) <= self.limit_bytes

    def scan(self) -> Scanned:
        """Read all frame headers of earlier runs; the newest segment is written on from where it was cut."""
        places: list[Place] = []
        torn = 0
        for segment in self._directory.existing():
            self._add(segment)
            end, whole = self._scan_segment(segment, places)
            torn += not whole
            self._active, self._position = segment, end
        if self._active is not None:
            self._active.cut(self._position)
        while self._used_bytes > self.limit_bytes:
            oldest = min(self._segments)
            places = [place for place in places if place.segment != oldest]
            self.remove(oldest)
        return Scanned(places, torn)

    def open_segment(self) -> None:
        """Write to a new segment from now on; the caller has seen `may_open`."""
        segment = self._directory.create(self._last_sequence + 1, self.segment_bytes)
        self._add(segment)
        self._active, self._position = segment, PAGE_BYTES

    def append(self, blocks: Sequence[NewBlock]) -> list[Place]:
        """Write a frame; the caller has seen that there is room. Raises OSError or TooManyOwners."""
        records = [self._record(block) for block in blocks]
        return self._append(records, lambda i, memory: self._seal(blocks[i], records[i], memory))

    def copy(self, places: Sequence[Place]) -> list[Place]:
        """Append records as they lie elsewhere in the log, unread."""

        def fill(index: int, memory: memoryview) -> None:
            place = places[index]
            self._segments[place.segment].read_into(place.offset, memory)

        self._reached(BEFORE_COPY)
        return self._append([place.record for place in places], fill)

    def read(self, wanted: Sequence[Wanted]) -> list[str]:
        """Fill the buffers: what is wrong with each block, "" for nothing. Raises OSError.

        Neighbours are read at once.
        """
        faults: list[str] = []
        for group in _neighbours(wanted):
            first = group[0].place
            last = group[-1].place
            raw = scratch(last.offset + padded(last.record.stored_bytes) - first.offset)
            self._segments[first.segment].read_into(first.offset, raw)
            for one in group:
                offset = one.place.offset - first.offset
                faults.append(self._unseal(one, raw[offset : offset + one.place.record.stored_bytes]))
        return faults

    def remove(self, sequence: int) -> None:
        """Delete a segment that nobody reads any more."""
        self._reached(BEFORE_REMOVE)
        segment = self._segments.pop(sequence)
        self._directory.remove(segment)
        self._used_bytes -= segment_space(segment.header.num_bytes)
        if segment is self._active:
            self._active = None
        self._reached(AFTER_REMOVE)

    def close(self) -> None:
        """Close all files; what is durable stays."""
        self._behind.shutdown()
        for segment in self._segments.values():
            segment.close()
        self.keys.close()
        self._directory.close()

    def _add(self, segment: SegmentFile) -> None:
        self._segments[segment.header.sequence] = segment
        self._used_bytes += segment_space(segment.header.num_bytes)
        self._last_sequence = max(self._last_sequence, segment.header.sequence)

    def _scan_segment(self, segment: SegmentFile, places: list[Place]) -> tuple[int, bool]:
        """Where the committed part ends, and whether nothing but zeros follows."""
        header = segment.header
        position = PAGE_BYTES
        while position + PAGE_BYTES <= header.num_bytes:
            page = scratch(PAGE_BYTES)
            segment.read_into(position, page)
            try:
                size = frame_header_size(page)
                if size > PAGE_BYTES:
                    page = scratch(size)
                    segment.read_into(position, page)
                frame = decode_frame_header(page, header, position)
            except NotAFrame:
                return position, not any(page)
            places.extend(
                Place(header.sequence, offset, record)
                for record, offset in zip(frame.records, frame.offsets, strict=True)
            )
            position = frame.end
        return position, True

    def _append(self, records: Sequence[Record], fill: Callable[[int, memoryview], None]) -> list[Place]:
        segment, start = self._active, self._position
        assert segment is not None
        frame = frame_layout(records, start)
        assert frame.end <= segment.header.num_bytes
        memory = self._frame.take(frame.end - start)
        self._reached(BEFORE_DATA)
        self._write_payloads(segment, start, frame, memory, fill)
        segment.sync()
        self._reached(BEFORE_COMMIT)
        header = memory[: frame.offsets[0] - start]
        header[:] = encode_frame_header(frame.records, segment.header.sequence, start)
        segment.write(start, header, between=lambda: self._reached(MID_COMMIT), chunk_bytes=self._chunk_bytes)
        segment.sync()
        self._position = frame.end
        return [
            Place(segment.header.sequence, offset, record)
            for record, offset in zip(records, frame.offsets, strict=True)
        ]

    def _write_payloads(
        self,
        segment: SegmentFile,
        start: int,
        frame: Frame,
        memory: memoryview,
        fill: Callable[[int, memoryview], None],
    ) -> None:
        """Fill the frame and write it behind, so that encryption and disk overlap."""
        written = frame.offsets[0]
        writes: list[Future[None]] = []
        try:
            for i, (offset, size) in enumerate(_extents(frame)):
                fill(i, memory[offset - start : offset - start + size])
                end = offset + size
                if end - written >= self._chunk_bytes or end == frame.end:
                    data = memory[written - start : end - start]
                    writes.append(self._behind.submit(self._write_chunk, segment, written, data))
                    written = end
        finally:
            wait(writes)
        for write in writes:
            write.result()

    def _write_chunk(self, segment: SegmentFile, offset: int, data: memoryview) -> None:
        segment.write(offset, data, between=lambda: self._reached(MID_RECORD), chunk_bytes=self._chunk_bytes)

    def _unseal(self, wanted: Wanted, stored: memoryview) -> str:
        """What is wrong with the block, "" for nothing."""
        record, payload = wanted.place.record, wanted.payload
        key = self.keys.find(wanted.owner, record.key_id)
        if key is None:
            return "key"
        if len(stored) != len(payload) + (TAG_BYTES if record.sealed else 0):
            return "size"
        try:
            if record.sealed:
                key.cipher.decrypt_into(record.nonce, stored, record.header, payload)
            else:
                payload[:] = stored
            verify_payload(decode_header(record.header), payload)
        except InvalidTag:
            return "seal"
        except BlockInvalid as error:
            return error.reason
        return ""

    def _record(self, block: NewBlock) -> Record:
        key = self.keys.obtain(block.owner)
        size = len(block.payload) + (TAG_BYTES if self.encrypts else 0)
        nonce = os.urandom(NONCE_BYTES) if self.encrypts else bytes(NONCE_BYTES)
        return Record(block.header, block.created_s, size, self.encrypts, nonce, key.key_id)

    def _seal(self, block: NewBlock, record: Record, memory: memoryview) -> None:
        size = record.stored_bytes
        if record.sealed:
            key = self.keys.obtain(block.owner)
            key.cipher.encrypt_into(record.nonce, block.payload, record.header, memory[:size])
        else:
            memory[:size] = block.payload
        memory[size:] = bytes(len(memory) - size)


def _neighbours(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Runs of records that lie one after another, of READ_BYTES at most unless it is one."""
    group: list[Wanted] = []
    for one in wanted:
        if group:
            last, first = group[-1].place, group[0].place
            end = last.offset + padded(last.record.stored_bytes)
            adjoins = one.place.segment == last.segment and one.place.offset == end
            if not adjoins or end + padded(one.place.record.stored_bytes) - first.offset > READ_BYTES:
                yield group
                group = []
        group.append(one)
    if group:
        yield group


def _extents(frame: Frame) -> Iterator[tuple[int, int]]:
    for record, offset in zip(frame.records, frame.offsets, strict=True):
        yield offset, padded(record.stored_bytes)
