"""Reads by directory: the puller copies listed blocks out of the holder's memory without a word to it.

Bytes copied while an entry of the directory did not change are the block's. The holder is told afterwards what was
read, in its own time: it counts hits, and keeps what is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.common.blocks import BlockId, join_ids
from services.common.transfer import wire
from services.common.transfer.errors import ProtocolViolation
from services.common.transfer.protocol import OnBlock, PullRequest
from services.common.transfer.shm_connection import ShmConnection

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
            header = _copy(connection, block_id, buffer)
            if header is None:
                break
            on_block(num_read, header, LISTED_TIER)
            num_read += 1
            left -= len(buffer)
    finally:
        if num_read:
            ids = join_ids(request.ids[:num_read])
            seconds = loop.time() - started_s
            connection.send_later(wire.WasRead(ids, seconds, request.traceparent, request.request_id))
    return num_read


def _copy(connection: ShmConnection, block_id: BlockId, buffer: memoryview) -> bytes | None:
    """Copy one block; returns its header, None when it is not listed, or was not all the while."""
    directory = connection.peer_directory
    if directory is None:
        return None
    listed = directory.find(block_id)
    if listed is None or listed.place[2] != len(buffer):
        return None
    try:
        buffer[:] = connection.peer_view(listed.place)
    except ProtocolViolation as violation:
        if not directory.is_current(listed):
            return None
        connection.fail(violation)
        raise
    return listed.header if directory.is_current(listed) else None
