"""Parts of blocks as the ranks of a tensor-parallel replica offer them."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.blocks import BlockId
from services.common.transfer.header import NO_OWNER, UNKNOWN_PARENT, BlockFormat, Segment, make_header
from services.common.transfer.heads import HeadRange
from services.kvstore.part_reservation import PartReservation
from services.kvstore.reservations import StoreReservation
from services.kvstore.store import Store
from tests.common.transfer.blocks import payload

NUM_HEADS = 4
BLOCK_BYTES = NUM_HEADS * 2 * 16 * 16 * 2
MODEL = b"m" * 16
WHOLE = HeadRange(0, NUM_HEADS)
LEFT, RIGHT = HeadRange(0, 2), HeadRange(2, 2)


def format_of(block_bytes: int = BLOCK_BYTES, *, model: bytes = MODEL, num_heads: int = NUM_HEADS) -> BlockFormat:
    """One layer of bfloat16."""
    segment = Segment(0, 1, (num_heads, 1, 2, 16, block_bytes // num_heads // 64), "bfloat16")
    return BlockFormat(model, "bfloat16", num_heads, block_bytes, (segment,))


def share(block_id: BlockId, heads: HeadRange, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes of a block's heads."""
    return bytes(heads.share(memoryview(payload(block_id, block_bytes)), NUM_HEADS))


def part_header(
    ids: Sequence[BlockId],
    index: int,
    heads: HeadRange,
    data: bytes,
    *,
    owner: bytes = NO_OWNER,
    block_format: BlockFormat | None = None,
) -> bytes:
    """The header of a part of block `index` of a chain."""
    return make_header(
        block_format or format_of(),
        ids[index],
        memoryview(data),
        parent_id=ids[index - 1] if index else UNKNOWN_PARENT,
        owner_digest=owner,
        starts_chain=index == 0,
        heads=heads,
    )


async def offer(
    store: Store,
    ids: Sequence[BlockId],
    heads: HeadRange,
    *,
    first: int = 0,
    owner: bytes = NO_OWNER,
    spoil: int = -1,
) -> StoreReservation | PartReservation:
    """A reservation for the heads of blocks `first` on, its buffers written; the part of block `spoil` is wrong."""
    data = [share(block_id, heads) for block_id in ids[first:]]
    headers = [part_header(ids, first + i, heads, part, owner=owner) for i, part in enumerate(data)]
    reservation = await store.reserve(headers, 0)
    for i, buffer in enumerate(reservation.buffers, first + reservation.num_held):
        buffer[:] = data[i - first]
        if i == spoil:
            buffer[0] ^= 1
    return reservation


async def push(store: Store, ids: Sequence[BlockId], heads: HeadRange, *, first: int = 0, spoil: int = -1) -> int:
    """Offer and commit; how many parts of the offer are held then."""
    return await (await offer(store, ids, heads, first=first, spoil=spoil)).commit()
