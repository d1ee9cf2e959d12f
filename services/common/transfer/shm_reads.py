"""Reads by directory: the puller copies listed blocks out of the holder's memory without a word to it.

Bytes copied while an entry of the directory did not change are the block's. The holder is told afterwards what was
read, in its own time: it counts hits, and keeps what is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common.blocks import BlockId
from services.common.transfer import wire
from services.common.transfer.errors import BlockInvalid, ProtocolViolation
from services.common.transfer.header import decode_header
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import OnBlock, PullRequest
from services.common.transfer.shm_connection import ShmConnection
from services.common.transfer.shm_directory import Listed
from services.common.transfer.wire import Place

# Copied (and, by the callers, verified) before the loop gets another turn: a quarter of a millisecond.
TURN_BYTES = 2 * 2**20
LISTED_TIER = "ram"


async def read_listed(
    connection: ShmConnection, request: PullRequest, buffers: Sequence[memoryview], on_block: OnBlock
) -> int:
    """Copy the leading blocks of a pull that the peer lists. Returns how many; the others have to be asked for.

    Raises ProtocolViolation, and fails the connection, when the directory names memory that is not there.
    """
    directory = connection.peer_directory
    if directory is None or request.epoch not in (0, directory.epoch):
        return 0
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    num_read, left = 0, TURN_BYTES
    try:
        for block_id, buffer in zip(request.ids, buffers, strict=True):
            if left <= 0:
                left = TURN_BYTES
                await asyncio.sleep(0)
                if loop.time() - started_s >= request.deadline_s:
                    break
            header = _copy(connection, block_id, buffer, request.heads)
            if header is None:
                break
            on_block(num_read, header, LISTED_TIER)
            num_read += 1
            left -= len(buffer)
    finally:
        if num_read:
            connection.send_later(wire.WasRead.of(request, num_read, loop.time() - started_s))
    return num_read


def _copy(connection: ShmConnection, block_id: BlockId, buffer: memoryview, heads: HeadRange | None) -> bytes | None:
    """Copy one block or its `heads`; returns its header, None when it is not listed, or was not all the while."""
    directory = connection.peer_directory
    if directory is None:
        return None
    listed = directory.find(block_id)
    place = None if listed is None else listed.place if heads is None else _place_of(listed, heads)
    if listed is None or place is None or place[2] != len(buffer):
        return None
    try:
        buffer[:] = connection.peer_view(place)
    except ProtocolViolation as violation:
        if not directory.is_current(listed):
            return None
        connection.fail(violation)
        raise
    return listed.header if directory.is_current(listed) else None


def _place_of(listed: Listed, heads: HeadRange) -> Place | None:
    """Where these heads of a listed block lie; None when it does not have them."""
    region, offset, num_bytes = listed.place
    try:
        header = decode_header(listed.header)
        if num_bytes != header.covered_bytes or not header.covered.contains(heads):
            return None
    except BlockInvalid:
        return None
    head_bytes, first = num_bytes // header.covered.count, heads.first - header.covered.first
    return region, offset + first * head_bytes, heads.count * head_bytes
