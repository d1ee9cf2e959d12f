"""One announcement as it travels: the header that routers read from the change stream, and its packed entries."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from services.common.blocks import BLOCK_ID_BYTES, BlockId, join_ids

_ENTRY = struct.Struct("16sB")
# More ids than this are combined faster by numpy.
_FEW_IDS = 32
_HEADER = struct.Struct("<QQBI16s")


class Tier(IntEnum):
    """Which memory holds a block. HBM stands for a worker's own pool, whatever device that is on."""

    HBM = 0
    RAM = 1
    SSD = 2


class Kind(IntFlag):
    """What an announcement is: a CHANGE of the current set, or a STAGED part of a whole one, from BEGIN to COMMIT."""

    CHANGE = 0
    STAGED = 1
    BEGIN = 2
    COMMIT = 4
    RETIRE = 8


@dataclass(frozen=True, slots=True)
class Header:
    """count and xor (of the ids as little-endian numbers) describe the set once this announcement is applied."""

    epoch: int
    seq: int
    kind: Kind
    count: int
    xor: int

    def pack(self) -> bytes:
        """As bytes."""
        return _HEADER.pack(self.epoch, self.seq, self.kind, self.count, pack_xor(self.xor))

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """From bytes. Raises struct.error."""
        epoch, seq, kind, count, xor = _HEADER.unpack(data)
        return cls(epoch, seq, Kind(kind), count, unpack_xor(xor))


def pack_xor(xor: int) -> bytes:
    """A digest as 16 bytes."""
    return xor.to_bytes(BLOCK_ID_BYTES, "little")


def unpack_xor(data: bytes) -> int:
    """Inverse of `pack_xor`."""
    return int.from_bytes(data, "little")


def xor_of(ids: Sequence[BlockId]) -> int:
    """XOR of `ids` as little-endian numbers; each counts, also where one comes twice."""
    if len(ids) <= _FEW_IDS:
        result = 0
        for id_ in ids:
            result ^= unpack_xor(id_)
        return result
    words = np.frombuffer(join_ids(ids), "<u8").reshape(-1, 2)
    return unpack_xor(np.bitwise_xor.reduce(words, axis=0).tobytes())


def pack_adds(entries: list[tuple[BlockId, int]]) -> bytes:
    """Ids with their tiers, 17 bytes each."""
    return b"".join([id_ + bytes((tier,)) for id_, tier in entries])


def unpack_adds(data: bytes) -> list[tuple[BlockId, int]]:
    """Inverse of `pack_adds`. Raises struct.error when the length is no multiple of an entry's."""
    return list(_ENTRY.iter_unpack(data))
