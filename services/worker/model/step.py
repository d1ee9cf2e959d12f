"""The plain-data contract between the scheduler and the model runner: one step over a mixed batch.

A step is a flat list of query tokens of several sequences; prefill chunks and decode tokens are the same thing.
Block tables index the worker's block pool; the KV of a step's tokens is written before it is attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    # Engines that simulate a model run without.
    import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass. T query tokens of S sequences, L rows whose logits are wanted.

    token_ids: int32 [T]. positions: int32 [T], of each token in its sequence.
    query_starts: int32 [S + 1], sequence s owns tokens query_starts[s]:query_starts[s + 1].
    context_lens: int32 [S], tokens in the cache after this step (last position + 1).
    block_tables: int32 [S, B], pool slots of each sequence's blocks in order, padded with -1.
    logit_rows: int32 [L], indices into the T tokens.
    adapters: int32 [S], slot of each sequence's adapter and -1 for none; None where no sequence has one.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_rows: Int32Array
    adapters: Int32Array | None = None


class Runner(Protocol):
    """Executes steps of one model replica. At most one step is in flight."""

    def submit(self, step: StepInput) -> None:
        """Start a step. Raises ValueError when the step's arrays disagree; the pool is then untouched."""

    def collect(self) -> torch.Tensor:
        """Wait for the submitted step; float32 logits [L, vocab_size], one row for each of logit_rows."""

    def hidden(self) -> torch.Tensor:
        """Of the step that was collected last: float32 [L, hidden size], what its logits were made from."""
