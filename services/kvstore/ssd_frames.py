"""How much goes into one frame. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.ssd_format import MAX_FRAME_RECORDS, Record, frame_header_bytes, padded
from services.kvstore.ssd_log import NewBlock, Place, stored_bytes

FRAME_BYTES = 16 * 2**20


def frame_share(header: bytes, payload_bytes: int) -> int:
    """Most that a block adds to a frame."""
    return stored_bytes(payload_bytes) + padded(len(header))


def frame_bytes(blocks: Sequence[NewBlock]) -> int:
    """Most that a frame of these takes."""
    records = [Record(block.header, 0, 0, False, bytes(12), bytes(8)) for block in blocks]
    return frame_header_bytes(records) + sum(stored_bytes(len(block.payload)) for block in blocks)


def places_bytes(places: Sequence[Place]) -> int:
    """Most that a frame of copies takes."""
    return frame_header_bytes([place.record for place in places]) + sum(
        stored_bytes(place.record.stored_bytes) for place in places
    )


def frames(places: Sequence[Place]) -> list[list[Place]]:
    """Cut into what goes into one frame each."""
    cut: list[list[Place]] = []
    room = 0
    for place in places:
        size = stored_bytes(place.record.stored_bytes)
        if not cut or size > room or len(cut[-1]) >= MAX_FRAME_RECORDS:
            cut.append([])
            room = FRAME_BYTES
        cut[-1].append(place)
        room -= size
    return cut
