"""Which blocks lie where in a holder's memory, in memory itself: peers on the host read blocks without asking.

A set-associative table in a region of its own. Its owner lists a block once its bytes are in place, and strikes it off
before they change; each entry carries a generation, odd while the entry is not to be used. A reader takes entry and
bytes, then looks whether the generation is still the same (a sequence lock; Boehm, "Can seqlocks get along with
programming language memory models?", MSPC 2012). So a read waits for nobody, not even for a holder that is stopped.
What finds no place here, or was lost in the middle of a copy, is asked for instead.

The order in which one core's stores become visible to another is what x86-64 guarantees; elsewhere nothing is listed.
Checksums find what any of this would miss.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass

from services.common.blocks import BlockId
from services.common.transfer.errors import ProtocolViolation
from services.common.transfer.protocol import PullRequest
from services.common.transfer.shm_regions import Region, create_region
from services.common.transfer.wire import Place

_MAGIC = b"KVMD"
_VERSION = 1
_HEAD = struct.Struct("<4sHHQQ")
_HEAD_BYTES = 64
_WAYS = 8
_TAGS = struct.Struct(f"<{_WAYS}Q")
_TAG = struct.Struct("<Q")
_GENERATION = struct.Struct("<Q")
# Generation, id, offset, size, region, bytes of the header that follows.
_FIELDS = struct.Struct("<Q16sQIHH")
_ENTRY_BYTES = 512
MAX_LISTED_HEADER = _ENTRY_BYTES - _FIELDS.size
# One entry for so much memory: room for blocks of twice the size with half of the table free.
_BYTES_PER_ENTRY = 128 * 1024


def directory_supported() -> bool:
    """Whether this machine keeps the order of stores that readers rely on."""
    return platform.machine() == "x86_64"


class BlockDirectory:
    """The owner's side: the only writer. `region` is what it shows."""

    def __init__(self, region: Region, num_buckets: int, epoch: int) -> None:
        """For blocks in the first of the regions that the owner shows."""
        self.region = region
        self._memory = region.view
        self._num_buckets = num_buckets
        # Of each listed block: where its tag and its entry are.
        self._places: dict[BlockId, tuple[int, int]] = {}
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, _WAYS, num_buckets, epoch)

    @classmethod
    def create(cls, capacity_bytes: int, epoch: int) -> BlockDirectory | None:
        """For a memory of this size; None where it is not supported. Raises OSError."""
        num_buckets = max(1, capacity_bytes // _BYTES_PER_ENTRY // _WAYS)
        region = create_region("kvmesh-directory", _size(num_buckets)) if directory_supported() else None
        return cls(region, num_buckets, epoch) if region is not None else None

    def __len__(self) -> int:
        return len(self._places)

    def add(self, block_id: BlockId, offset: int, num_bytes: int, header: bytes) -> bool:
        """List a block whose bytes are in place; False when there is no room for it, or its tag is taken."""
        if len(header) > MAX_LISTED_HEADER or block_id in self._places:
            return False
        bucket, tag = _bucket_of(block_id, self._num_buckets)
        tags_at = _HEAD_BYTES + bucket * _TAGS.size
        tags = _TAGS.unpack_from(self._memory, tags_at)
        if 0 not in tags or tag in tags:
            return False
        way = tags.index(0)
        at = _entry_at(self._num_buckets, bucket, way)
        generation = self._turn_odd(at)
        _FIELDS.pack_into(self._memory, at, generation, block_id, offset, num_bytes, 0, len(header))
        self._memory[at + _FIELDS.size : at + _FIELDS.size + len(header)] = header
        _GENERATION.pack_into(self._memory, at, generation + 1)
        _TAG.pack_into(self._memory, tags_at + way * _TAG.size, tag)
        self._places[block_id] = tags_at + way * _TAG.size, at
        return True

    def remove(self, block_id: BlockId) -> None:
        """Strike a block off, listed or not; after that its bytes may change."""
        place = self._places.pop(block_id, None)
        if place is not None:
            self._turn_odd(place[1])
            _TAG.pack_into(self._memory, place[0], 0)

    def _turn_odd(self, at: int) -> int:
        (generation,) = _GENERATION.unpack_from(self._memory, at)
        generation = int(generation) + 1 | 1
        _GENERATION.pack_into(self._memory, at, generation)
        return generation


@dataclass(frozen=True, slots=True)
class ShownDirectory:
    """What a server shows beside the memory itself, and whom it tells that blocks were read.

    was_read: called with the blocks (epoch and deadline are not known) and the seconds it took; a reader tells
    afterwards, if at all.
    """

    region: Region
    was_read: Callable[[PullRequest, float], None]


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry as it was read; good only if `is_current` says so after its bytes were copied."""

    generation: int
    at: int
    place: Place
    header: bytes


class DirectoryReader:
    """A peer's directory. What it says is the peer's word: places are checked by whoever looks there."""

    def __init__(self, memory: memoryview) -> None:
        """Raises ProtocolViolation when `memory` is no directory."""
        if len(memory) < _HEAD_BYTES:
            raise ProtocolViolation("no directory of blocks")
        magic, version, ways, num_buckets, self.epoch = _HEAD.unpack_from(memory)
        if (magic, version, ways) != (_MAGIC, _VERSION, _WAYS) or not num_buckets or len(memory) < _size(num_buckets):
            raise ProtocolViolation("no directory of blocks that is known here")
        self._memory = memory
        self._num_buckets: int = num_buckets

    def find(self, block_id: BlockId) -> Listed | None:
        """Where a block lies."""
        bucket, tag = _bucket_of(block_id, self._num_buckets)
        tags = _TAGS.unpack_from(self._memory, _HEAD_BYTES + bucket * _TAGS.size)
        if tag not in tags:
            return None
        at = _entry_at(self._num_buckets, bucket, tags.index(tag))
        generation, found_id, offset, num_bytes, region, header_bytes = _FIELDS.unpack_from(self._memory, at)
        if generation & 1 or found_id != block_id or header_bytes > MAX_LISTED_HEADER:
            return None
        start = at + _FIELDS.size
        header = bytes(self._memory[start : start + header_bytes])
        return Listed(generation, at, (region, offset, num_bytes), header)

    def is_current(self, listed: Listed) -> bool:
        """Whether what was read since `find` was the block."""
        (generation,) = _GENERATION.unpack_from(self._memory, listed.at)
        return bool(generation == listed.generation)


def _bucket_of(block_id: BlockId, num_buckets: int) -> tuple[int, int]:
    """Bucket and tag of an id, from different halves; a tag is never 0."""
    tag = int.from_bytes(block_id[8:16], "little")
    return int.from_bytes(block_id[:8], "little") % num_buckets, tag or 1


def _entry_at(num_buckets: int, bucket: int, way: int) -> int:
    return _HEAD_BYTES + num_buckets * _TAGS.size + (bucket * _WAYS + way) * _ENTRY_BYTES


def _size(num_buckets: int) -> int:
    return _entry_at(num_buckets, num_buckets, 0)
