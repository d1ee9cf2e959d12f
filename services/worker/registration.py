"""Ids of a sequence's blocks, and making them reusable in the pool as they are completed. Pure."""

from __future__ import annotations

import numpy as np

from services.common.blocks import BLOCK_TOKENS, chain_block_ids
from services.worker.block_pool import BlockPool
from services.worker.sequence import Sequence


class Registration:
    """Continues the chains of ids that requests bring, with the key of the mesh."""

    def __init__(self, pool: BlockPool, block_key: bytes) -> None:
        self._pool = pool
        self._block_key = block_key

    def name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Give ids to the full blocks of the first `num_tokens` known tokens that have none."""
        ids = sequence.block_ids
        parent, first = ids[-1] if ids else sequence.request.block_root, len(ids) * BLOCK_TOKENS
        ids += chain_block_ids(self._block_key, parent, sequence.tokens[first:num_tokens].astype(np.uint32))

    def register(self, sequence: Sequence) -> int | None:
        """Make newly computed full blocks reusable; the slot of the last one, None when there is none."""
        first, end = sequence.num_registered, sequence.num_computed // BLOCK_TOKENS
        if first == end:
            return None
        self.name_blocks(sequence, end * BLOCK_TOKENS)
        for index in range(first, end):
            parent = sequence.slots[index - 1] if index else None
            slot = self._pool.register(sequence.slots[index], sequence.block_ids[index], parent)
            if slot != sequence.slots[index]:
                sequence.replace_slot(index, slot)
        sequence.num_registered = end
        return sequence.slots[end - 1]
