"""Blocks that both ends of a test can make by themselves."""

from __future__ import annotations

import numpy as np

from services.common.blocks import BlockId, chain_block_ids
from services.common.transfer.header import NO_OWNER, UNKNOWN_PARENT, BlockFormat, Segment, make_header

SECRET = "a secret of this test mesh"
KEY = bytes(range(32))
EPOCH = 7


def block_format(block_bytes: int, num_kv_heads: int = 3) -> BlockFormat:
    """A bfloat16 format whose blocks have this size."""
    shape = (num_kv_heads, 1, 2, 16, block_bytes // num_kv_heads // 64)
    segment = Segment(0, 1, shape, "bfloat16")
    assert segment.num_bytes == block_bytes
    return BlockFormat(b"m" * 16, "bfloat16", num_kv_heads, block_bytes, (segment,))


def chain(count: int, chain_number: int = 0) -> list[BlockId]:
    """Ids of a prompt of `count` blocks."""
    return chain_block_ids(KEY, BlockId(bytes([chain_number]) * 16), list(range(16 * count)))


def payload(block_id: BlockId, block_bytes: int) -> bytes:
    """The bytes of a block."""
    return np.random.default_rng(int.from_bytes(block_id, "little")).bytes(block_bytes)


def header(ids: list[BlockId], index: int, data: bytes, owner: bytes = NO_OWNER) -> bytes:
    """The header of block `index` of a chain."""
    return make_header(
        block_format(len(data)),
        ids[index],
        memoryview(data),
        parent_id=ids[index - 1] if index else UNKNOWN_PARENT,
        owner_digest=owner,
        starts_chain=index == 0,
    )
