"""The arrays of one step as the kernels read them: query tokens of several sequences over a paged KV pool.

Shared by every kernel and its reference. All arrays are contiguous int32; nothing here checks them, the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

BLOCK_TOKENS = 16

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PagedBatch:
    """T query tokens of S sequences; sequence s owns tokens query_starts[s]:query_starts[s + 1].

    token_ids, positions: [T]. query_starts: [S + 1]. context_lens: [S], tokens in the pool after this step.
    block_tables: [S, B], pool slots in order; entries beyond the context are never read. logit_rows: [L], into T.
    adapters: [S], slot of each sequence's adapter and -1 for none; None where no sequence has one.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array
    adapters: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @cached_property
    def token_adapters(self) -> torch.Tensor | None:
        """int32 [T]: each token's adapter, -1 for none; None where no sequence has one."""
        if self.adapters is None:
            return None
        return torch.from_numpy(np.repeat(self.adapters, np.diff(self.query_starts)))

    @cached_property
    def token_tables(self) -> torch.Tensor:
        """int64 [T, B]: each token's block table, with unused entries made 0 so that they can be gathered."""
        tables = np.repeat(self.block_tables, np.diff(self.query_starts), axis=0)
        return torch.from_numpy(np.maximum(tables, 0).astype(np.int64))
