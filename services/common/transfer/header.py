"""The header that travels and rests with a block, and the check that a block is what it must be.

Binary, little-endian: magic, version, total length, ids and digests, layout version, dtype, segments, one xxh3-64
checksum per KV head over that head's contiguous part of the payload, and at the end the xxh3-64 of everything before
it. The payload is `[kv_head][layer][k|v][token][head_dim]`, so a head's part can be sent and checked alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from xxhash import xxh3_64_intdigest

from services.common.blocks import BLOCK_ID_BYTES, LAYOUT_VERSION, BlockId
from services.common.transfer.errors import BlockInvalid

HEADER_VERSION = 1
MAX_HEADER_BYTES = 16 * 1024
# Parent of a block whose sender was not told it.
UNKNOWN_PARENT = BlockId(bytes(BLOCK_ID_BYTES))
NO_OWNER = bytes(BLOCK_ID_BYTES)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}

_MAGIC = b"KVMB"
_STARTS_CHAIN = 1
_FIXED = struct.Struct("<4sHHBB16s16s16sI")
_COUNTS = struct.Struct("<HH")
_SEGMENT = struct.Struct("<HHB")
_DIGEST = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of the payload: layers `first_layer` .. `first_layer + num_layers`, of this shape and dtype."""

    first_layer: int
    num_layers: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment. Raises BlockInvalid for a dtype nobody knows."""
        if self.dtype not in DTYPE_BYTES:
            raise BlockInvalid("dtype")
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of one replica have in common."""

    model_digest: bytes
    kv_dtype: str
    num_kv_heads: int
    block_bytes: int
    segments: tuple[Segment, ...]
    layout_version: int = LAYOUT_VERSION


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Decoded header. starts_chain: the block is the first of its prompt and its parent is a root."""

    block_id: BlockId
    parent_id: BlockId
    model_digest: bytes
    owner_digest: bytes
    layout_version: int
    kv_dtype: str
    segments: tuple[Segment, ...]
    checksums: tuple[int, ...]
    starts_chain: bool = False

    @property
    def payload_bytes(self) -> int:
        """Size of the block."""
        return sum(segment.num_bytes for segment in self.segments)

    def encode(self) -> bytes:
        """The header's bytes. Raises ValueError when a part is longer than its length field can say."""
        flags = _STARTS_CHAIN if self.starts_chain else 0
        body = b"".join(
            (
                _short(self.model_digest),
                _short(self.kv_dtype.encode()),
                _COUNTS.pack(len(self.segments), len(self.checksums)),
                *(_encode_segment(segment) for segment in self.segments),
                struct.pack(f"<{len(self.checksums)}Q", *self.checksums),
            )
        )
        size = _FIXED.size + len(body) + _DIGEST.size
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"block header of {size} bytes")
        ids = (bytes(self.block_id), bytes(self.parent_id), self.owner_digest)
        fixed = _FIXED.pack(_MAGIC, HEADER_VERSION, size, flags, 0, *ids, self.layout_version)
        return fixed + body + _DIGEST.pack(xxh3_64_intdigest(fixed + body))


def make_header(
    block_format: BlockFormat,
    block_id: BlockId,
    payload: memoryview,
    *,
    parent_id: BlockId = UNKNOWN_PARENT,
    owner_digest: bytes = NO_OWNER,
    starts_chain: bool = False,
) -> bytes:
    """Encoded header of a block whose bytes are in `payload`; reads all of them."""
    return BlockHeader(
        block_id,
        parent_id,
        block_format.model_digest,
        owner_digest,
        block_format.layout_version,
        block_format.kv_dtype,
        block_format.segments,
        head_checksums(payload, block_format.num_kv_heads),
        starts_chain,
    ).encode()


def head_checksums(payload: memoryview, num_kv_heads: int) -> tuple[int, ...]:
    """xxh3-64 of each KV head's part of `payload`."""
    size = len(payload) // num_kv_heads
    return tuple(xxh3_64_intdigest(payload[i * size : (i + 1) * size]) for i in range(num_kv_heads))


def decode_header(data: bytes) -> BlockHeader:
    """The header in `data`, whole and unchanged. Raises BlockInvalid."""
    if not _FIXED.size + _DIGEST.size <= len(data) <= MAX_HEADER_BYTES:
        raise BlockInvalid("header")
    magic, version, size, flags, _, block_id, parent_id, owner, layout_version = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != HEADER_VERSION or size != len(data):
        raise BlockInvalid("version" if magic == _MAGIC and version != HEADER_VERSION else "header")
    if xxh3_64_intdigest(data[: -_DIGEST.size]) != _DIGEST.unpack_from(data, len(data) - _DIGEST.size)[0]:
        raise BlockInvalid("header")
    common = _decode_common(data)
    checksums = struct.unpack_from(f"<{common.num_checksums}Q", data, common.end)
    return BlockHeader(
        BlockId(block_id),
        BlockId(parent_id),
        common.model_digest,
        owner,
        layout_version,
        common.kv_dtype,
        common.segments,
        checksums,
        bool(flags & _STARTS_CHAIN),
    )


@dataclass(frozen=True, slots=True)
class _Common:
    """The part of a header that all blocks of a format share; `end` is where the checksums begin."""

    encoded: bytes
    model_digest: bytes
    kv_dtype: str
    segments: tuple[Segment, ...]
    num_checksums: int
    end: int


# Of the last header of each length: blocks come by the thousand from a few formats.
_known: dict[int, _Common] = {}
_MAX_KNOWN = 64


def _decode_common(data: bytes) -> _Common:
    known = _known.get(len(data))
    if known is not None and data.startswith(known.encoded, _FIXED.size):
        return known
    reader = _Reader(data, _FIXED.size)
    try:
        model_digest, kv_dtype = reader.short(), reader.short().decode()
        num_segments, num_checksums = reader.unpack(_COUNTS)
        segments = tuple(reader.segments(num_segments))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise BlockInvalid("header") from None
    if reader.position + num_checksums * _DIGEST.size != len(data) - _DIGEST.size or not num_checksums:
        raise BlockInvalid("header")
    encoded = bytes(data[_FIXED.size : reader.position])
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    found = _known[len(data)] = _Common(encoded, model_digest, kv_dtype, segments, num_checksums, reader.position)
    return found


def verify_payload(header: BlockHeader, payload: memoryview) -> None:
    """Raises BlockInvalid when `payload` is not, to the last bit, what `header` describes."""
    if header.payload_bytes != len(payload) or len(payload) % len(header.checksums):
        raise BlockInvalid("size")
    if head_checksums(payload, len(header.checksums)) != header.checksums:
        raise BlockInvalid("checksum")


def verify_block(encoded: bytes, payload: memoryview, block_id: BlockId, expected: BlockFormat) -> BlockHeader:
    """The header of a received block that may be used as `block_id` of a replica. Raises BlockInvalid otherwise."""
    header = decode_header(encoded)
    if header.block_id != block_id:
        raise BlockInvalid("id")
    if header.model_digest != expected.model_digest:
        raise BlockInvalid("model")
    if header.layout_version != expected.layout_version:
        raise BlockInvalid("layout")
    if header.kv_dtype != expected.kv_dtype or header.segments != expected.segments:
        raise BlockInvalid("dtype")
    if len(header.checksums) != expected.num_kv_heads:
        raise BlockInvalid("size")
    verify_payload(header, payload)
    return header


def _short(value: bytes) -> bytes:
    if len(value) > 255:
        raise ValueError(f"header field of {len(value)} bytes")
    return bytes((len(value),)) + value


def _encode_segment(segment: Segment) -> bytes:
    head = _SEGMENT.pack(segment.first_layer, segment.num_layers, len(segment.shape))
    return head + struct.pack(f"<{len(segment.shape)}I", *segment.shape) + _short(segment.dtype.encode())


class _Reader:
    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self.position = position

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def short(self) -> bytes:
        start = self.position + 1
        self.position = start + self._data[self.position]
        return self._data[start : self.position]

    def segments(self, count: int) -> Iterator[Segment]:
        for _ in range(count):
            first_layer, num_layers, rank = self.unpack(_SEGMENT)
            shape = self.unpack(struct.Struct(f"<{rank}I"))
            yield Segment(first_layer, num_layers, shape, self.short().decode())
