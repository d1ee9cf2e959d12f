"""A source's lent blocks, narrowed to the KV heads that a puller asked for."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import decode_header
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import HeldBlock


def narrowed(blocks: Sequence[HeldBlock], heads: HeadRange) -> list[HeldBlock]:
    """The leading blocks that have all of `heads`, each with these alone; headers stay whole."""
    found: list[HeldBlock] = []
    for block in blocks:
        try:
            header = decode_header(block.header)
            if not header.covered.contains(heads):
                break
            share = heads.relative_to(header.covered).share(block.payload, header.covered.count)
        except BlockInvalid:
            break
        found.append(HeldBlock(block.header, share, block.tier))
    return found
