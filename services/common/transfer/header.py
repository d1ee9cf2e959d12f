"""The header that travels and rests with a block, and the check that a block is what it must be.

Binary, little-endian: magic, version, total length, ids and digests, layout version, dtype, segments, one xxh3-64
checksum per KV head over that head's contiguous part of the payload, and at the end the xxh3-64 of everything before
it. The payload is `[kv_head][layer][k|v][token][head_dim]`, so a head's part can be sent and checked alone.

Version 1 has the checksums of all heads. Version 2 has those of some, for a rank that owns no others: which heads, and
of how many, stands before them. What rests is version 1; all else in a header is about the whole block in both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from xxhash import xxh3_64_intdigest

from services.common.blocks import BLOCK_ID_BYTES, LAYOUT_VERSION, BlockId
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.heads import HeadRange

HEADER_VERSION, PART_VERSION = 1, 2
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
_PART = struct.Struct("<HH")
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

    @property
    def all_heads(self) -> HeadRange:
        """Every KV head."""
        return HeadRange(0, self.num_kv_heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in a block."""
        return self.block_bytes // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Decoded header. starts_chain: the block is the first of its prompt and its parent is a root.

    checksums: of the heads in `part`, of all when that is None. part_of: all heads of the block where there is a part.
    """

    block_id: BlockId
    parent_id: BlockId
    model_digest: bytes
    owner_digest: bytes
    layout_version: int
    kv_dtype: str
    segments: tuple[Segment, ...]
    checksums: tuple[int, ...]
    starts_chain: bool = False
    part: HeadRange | None = None
    part_of: int = 0

    @property
    def payload_bytes(self) -> int:
        """Size of the whole block."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the whole block."""
        return len(self.checksums) if self.part is None else self.part_of

    @property
    def covered(self) -> HeadRange:
        """Heads that the checksums are of."""
        return self.part or HeadRange(0, len(self.checksums))

    @property
    def covered_bytes(self) -> int:
        """Size of these heads. Raises BlockInvalid when the block does not divide into its heads."""
        size, rest = divmod(self.payload_bytes, self.num_kv_heads)
        if rest or not size:
            raise BlockInvalid("size")
        return size * len(self.checksums)

    def completed(self, checksums: tuple[int, ...]) -> BlockHeader:
        """The header of the whole block, given the checksums of all its heads."""
        return replace(self, part=None, part_of=0, checksums=checksums)

    def encode(self) -> bytes:
        """The header's bytes. Raises ValueError when a part is longer than its length field can say."""
        flags = _STARTS_CHAIN if self.starts_chain else 0
        part = self.part
        body = b"".join(
            (
                _short(self.model_digest),
                _short(self.kv_dtype.encode()),
                _COUNTS.pack(len(self.segments), len(self.checksums)),
                *(_encode_segment(segment) for segment in self.segments),
                b"" if part is None else _PART.pack(part.first, self.part_of),
                struct.pack(f"<{len(self.checksums)}Q", *self.checksums),
            )
        )
        size = _FIXED.size + len(body) + _DIGEST.size
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"block header of {size} bytes")
        ids = (bytes(self.block_id), bytes(self.parent_id), self.owner_digest)
        version = HEADER_VERSION if part is None else PART_VERSION
        fixed = _FIXED.pack(_MAGIC, version, size, flags, 0, *ids, self.layout_version)
        return fixed + body + _DIGEST.pack(xxh3_64_intdigest(fixed + body))


def make_header(
    block_format: BlockFormat,
    block_id: BlockId,
    payload: memoryview,
    *,
    parent_id: BlockId = UNKNOWN_PARENT,
    owner_digest: bytes = NO_OWNER,
    starts_chain: bool = False,
    heads: HeadRange | None = None,
) -> bytes:
    """Encoded header of a block whose bytes, or those of its `heads`, are in `payload`; reads all of them."""
    part = None if heads in (None, block_format.all_heads) else heads
    return BlockHeader(
        block_id,
        parent_id,
        block_format.model_digest,
        owner_digest,
        block_format.layout_version,
        block_format.kv_dtype,
        block_format.segments,
        head_checksums(payload, part.count if part else block_format.num_kv_heads),
        starts_chain,
        part,
        block_format.num_kv_heads if part else 0,
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
    known_version = version in (HEADER_VERSION, PART_VERSION)
    if magic != _MAGIC or not known_version or size != len(data):
        raise BlockInvalid("version" if magic == _MAGIC and not known_version else "header")
    if xxh3_64_intdigest(data[: -_DIGEST.size]) != _DIGEST.unpack_from(data, len(data) - _DIGEST.size)[0]:
        raise BlockInvalid("header")
    common = _decode_common(data, _PART.size if version == PART_VERSION else 0)
    part, part_of = _decode_part(data, common) if version == PART_VERSION else (None, 0)
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
        part,
        part_of,
    )


@dataclass(frozen=True, slots=True)
class _Common:
    """What the headers of all blocks of a format share; `end` is where the checksums begin."""

    encoded: bytes
    model_digest: bytes
    kv_dtype: str
    segments: tuple[Segment, ...]
    num_checksums: int
    end: int


# Of the last header of each length, with or without a part: blocks come by the thousand from a few formats.
_known: dict[tuple[int, int], _Common] = {}
_MAX_KNOWN = 64


def _decode_common(data: bytes, part_bytes: int) -> _Common:
    known = _known.get((len(data), part_bytes))
    if known is not None and data.startswith(known.encoded, _FIXED.size):
        return known
    reader = _Reader(data, _FIXED.size)
    try:
        model_digest, kv_dtype = reader.short(), reader.short().decode()
        num_segments, num_checksums = reader.unpack(_COUNTS)
        segments = tuple(reader.segments(num_segments))
    except (struct.error, IndexError, UnicodeDecodeError):
        raise BlockInvalid("header") from None
    end = reader.position + part_bytes
    if end + num_checksums * _DIGEST.size != len(data) - _DIGEST.size or not num_checksums:
        raise BlockInvalid("header")
    encoded = bytes(data[_FIXED.size : reader.position])
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    found = _Common(encoded, model_digest, kv_dtype, segments, num_checksums, end)
    _known[len(data), part_bytes] = found
    return found


def _decode_part(data: bytes, common: _Common) -> tuple[HeadRange, int]:
    """Which heads the checksums are of, and of how many; never all of them, which version 1 says."""
    first, of = _PART.unpack_from(data, common.end - _PART.size)
    if not common.num_checksums < of or first + common.num_checksums > of:
        raise BlockInvalid("heads")
    return HeadRange(first, common.num_checksums), of


def verify_payload(header: BlockHeader, payload: memoryview) -> None:
    """Raises BlockInvalid when `payload` is not, to the last bit, the heads that `header` covers."""
    if header.covered_bytes != len(payload):
        raise BlockInvalid("size")
    if head_checksums(payload, len(header.checksums)) != header.checksums:
        raise BlockInvalid("checksum")


def verify_block(
    encoded: bytes,
    payload: memoryview,
    block_id: BlockId,
    expected: BlockFormat,
    heads: HeadRange | None = None,
) -> BlockHeader:
    """The header of a received block that may be used as `block_id` of a replica. Raises BlockInvalid otherwise.

    heads: those in `payload`; None: all.
    """
    header = decode_header(encoded)
    if header.block_id != block_id:
        raise BlockInvalid("id")
    if header.model_digest != expected.model_digest:
        raise BlockInvalid("model")
    if header.layout_version != expected.layout_version:
        raise BlockInvalid("layout")
    if header.kv_dtype != expected.kv_dtype or header.segments != expected.segments:
        raise BlockInvalid("dtype")
    if header.num_kv_heads != expected.num_kv_heads:
        raise BlockInvalid("size")
    if heads is None and header.part is None:
        verify_payload(header, payload)
    else:
        _verify_heads(header, payload, heads or expected.all_heads)
    return header


def _verify_heads(header: BlockHeader, payload: memoryview, heads: HeadRange) -> None:
    covered = header.covered
    if not covered.contains(heads):
        raise BlockInvalid("heads")
    if len(payload) * len(header.checksums) != header.covered_bytes * heads.count:
        raise BlockInvalid("size")
    start = heads.first - covered.first
    if head_checksums(payload, heads.count) != header.checksums[start : start + heads.count]:
        raise BlockInvalid("checksum")


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
