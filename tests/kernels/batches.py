"""Random mixed batches over a paged pool, with garbage wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch

EMPTY = np.zeros(0, np.int32)


def make_batch(sequences: Sequence[tuple[int, int]], num_blocks: int, seed: int = 0) -> PagedBatch:
    """sequences: (query tokens, context) of each; blocks are taken in random order."""
    slots = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
    width = max(-(-context // BLOCK_TOKENS) for _, context in sequences)
    tables = np.full((len(sequences), width), -1, np.int32)
    for row, (_, context) in enumerate(sequences):
        for index in range(-(-context // BLOCK_TOKENS)):
            tables[row, index] = next(slots)
    queries = [tokens for tokens, _ in sequences]
    positions = [np.arange(context - tokens, context) for tokens, context in sequences]
    return PagedBatch(
        token_ids=np.zeros(sum(queries), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_starts=np.cumsum([0, *queries]).astype(np.int32),
        context_lens=np.array([context for _, context in sequences], np.int32),
        block_tables=tables,
        logit_rows=EMPTY,
    )


def make_pool(batch: PagedBatch, shape: tuple[int, int, int], num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """shape: kv_heads, layers, head_dim. Random within each context, NaN everywhere else."""
    kv_heads, layers, head_dim = shape
    pool = torch.full((num_blocks, kv_heads, layers, 2, BLOCK_TOKENS, head_dim), torch.nan, dtype=dtype)
    for table, context in zip(batch.block_tables, batch.context_lens, strict=True):
        for index in range(-(-int(context) // BLOCK_TOKENS)):
            valid = min(BLOCK_TOKENS, int(context) - index * BLOCK_TOKENS)
            pool[int(table[index]), :, :, :, :valid] = torch.randn(kv_heads, layers, 2, valid, head_dim).to(dtype)
    return pool
