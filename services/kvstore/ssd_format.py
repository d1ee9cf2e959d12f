"""How blocks lie in a segment file. Pure.

A segment is a header page and frames, one after another; a frame is a header of whole pages and the payloads of its
records, each from a page border on. The header names every record of the frame (block header, age, key, sizes) under
one checksum and is written after the payloads are durable: it is the commit, and a restart reads nothing else. It
also names its segment and place, so that a frame counts only where it was written. Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

PAGE_BYTES = 4096
TAG_BYTES = 16
NONCE_BYTES = 12
KEY_ID_BYTES = 8
MAX_FRAME_RECORDS = 256
FORMAT_VERSION = 2

_SEGMENT_MAGIC, _FRAME_MAGIC = b"KVMESHSG", b"KVMFRAME"
_SEGMENT = struct.Struct("<8sIIQQ")
_FRAME = struct.Struct("<8sIIQQQ")
_RECORD = struct.Struct("<QIIB12s8s")
_DIGEST = struct.Struct("<Q")
_SEALED = 1


class NotAFrame(Exception):
    """What lies there was never committed, or is damaged."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment. Sequence numbers are never used twice in a directory."""

    sequence: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A stored block. key_id: which key of the owner was in force; sealed: the payload is encrypted under it."""

    header: bytes
    created_s: int
    stored_bytes: int
    sealed: bool
    nonce: bytes
    key_id: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """A committed frame and the offsets of its payloads in the segment."""

    records: tuple[Record, ...]
    offsets: tuple[int, ...]
    end: int


def padded(num_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def frame_header_bytes(records: Sequence[Record]) -> int:
    """Size of a frame's header, in whole pages."""
    return padded(_FRAME.size + sum(_RECORD.size + len(record.header) for record in records) + _DIGEST.size)


def frame_layout(records: Sequence[Record], offset: int) -> Frame:
    """Where the parts of a frame at `offset` lie."""
    position = offset + frame_header_bytes(records)
    offsets = []
    for record in records:
        offsets.append(position)
        position += padded(record.stored_bytes)
    return Frame(tuple(records), tuple(offsets), position)


def encode_segment_header(header: SegmentHeader) -> bytes:
    """One page."""
    fixed = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, PAGE_BYTES, header.sequence, header.num_bytes)
    return (fixed + _DIGEST.pack(xxh3_64_intdigest(fixed))).ljust(PAGE_BYTES, b"\0")


def decode_segment_header(page: bytes | memoryview) -> SegmentHeader:
    """Raises NotAFrame."""
    magic, version, page_bytes, sequence, num_bytes = _SEGMENT.unpack_from(page)
    (digest,) = _DIGEST.unpack_from(page, _SEGMENT.size)
    if magic == _SEGMENT_MAGIC and version != FORMAT_VERSION:
        raise NotAFrame(f"format {version}")
    if (magic, page_bytes) != (_SEGMENT_MAGIC, PAGE_BYTES):
        raise NotAFrame("segment header")
    if digest != xxh3_64_intdigest(page[: _SEGMENT.size]):
        raise NotAFrame("segment header")
    return SegmentHeader(sequence, num_bytes)


def encode_frame_header(records: Sequence[Record], sequence: int, offset: int) -> bytes:
    """The commit of a frame, in whole pages."""
    size = frame_header_bytes(records)
    end = frame_layout(records, offset).end
    parts = [_FRAME.pack(_FRAME_MAGIC, size, len(records), sequence, offset, end)]
    for record in records:
        flags = _SEALED if record.sealed else 0
        parts.append(
            _RECORD.pack(record.created_s, len(record.header), record.stored_bytes, flags, record.nonce, record.key_id)
        )
        parts.append(record.header)
    body = b"".join(parts).ljust(size - _DIGEST.size, b"\0")
    return body + _DIGEST.pack(xxh3_64_intdigest(body))


def frame_header_size(page: bytes | memoryview) -> int:
    """Size of the frame header that begins with this page. Raises NotAFrame."""
    magic, size, count, _, _, _ = _FRAME.unpack_from(page)
    if magic != _FRAME_MAGIC or size % PAGE_BYTES or not 0 < size <= 2**24 or not 0 < count <= MAX_FRAME_RECORDS:
        raise NotAFrame("frame header")
    return int(size)


def decode_frame_header(data: bytes | memoryview, segment: SegmentHeader, offset: int) -> Frame:
    """The frame at `offset` of `segment` whose whole header is `data`. Raises NotAFrame."""
    if frame_header_size(data) != len(data):
        raise NotAFrame("frame header")
    body = data[: -_DIGEST.size]
    if xxh3_64_intdigest(body) != _DIGEST.unpack_from(data, len(body))[0]:
        raise NotAFrame("checksum")
    _, _, count, sequence, at, end = _FRAME.unpack_from(data)
    if (sequence, at) != (segment.sequence, offset) or end > segment.num_bytes:
        raise NotAFrame("place")
    records = []
    position = _FRAME.size
    for _ in range(count):
        created_s, length, stored_bytes, flags, nonce, key_id = _RECORD.unpack_from(data, position)
        position += _RECORD.size
        header = bytes(data[position : position + length])
        position += length
        records.append(Record(header, created_s, stored_bytes, bool(flags & _SEALED), nonce, key_id))
    frame = frame_layout(records, offset)
    if frame.end != end:
        raise NotAFrame("size")
    return frame
