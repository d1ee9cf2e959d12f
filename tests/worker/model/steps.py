"""Build steps for a runner from what a test has in mind: token chunks of sequences over chosen blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput


@dataclass(frozen=True)
class Chunk:
    """Tokens to compute at `start` of a sequence whose blocks are `table`."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


def make_step(chunks: Sequence[Chunk], *, last_only: bool = False) -> StepInput:
    """One step over the chunks; logits of all tokens, or of each chunk's last."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    starts = np.cumsum([0, *lengths])
    width = max(len(chunk.table) for chunk in chunks)
    tables = np.full((len(chunks), width), -1, np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.table)] = chunk.table
    return StepInput(
        token_ids=np.concatenate([chunk.tokens for chunk in chunks]).astype(np.int32),
        positions=np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks]).astype(np.int32),
        query_starts=starts.astype(np.int32),
        context_lens=np.array([chunk.start + len(chunk.tokens) for chunk in chunks], np.int32),
        block_tables=tables,
        logit_rows=(starts[1:] - 1 if last_only else np.arange(starts[-1])).astype(np.int32),
    )


def run(runner: CpuRunner, *chunks: Chunk, last_only: bool = False) -> torch.Tensor:
    """Logits of one step."""
    runner.submit(make_step(chunks, last_only=last_only))
    return runner.collect()


def run_in_chunks(runner: CpuRunner, tokens: Sequence[int], sizes: Sequence[int], table: Sequence[int]) -> torch.Tensor:
    """Logits of all tokens, computed in chunks whose sizes cycle."""
    outputs, start, turn = [], 0, 0
    while start < len(tokens):
        size = min(sizes[turn % len(sizes)], len(tokens) - start)
        outputs.append(run(runner, Chunk(tokens[start : start + size], start, table)))
        start, turn = start + size, turn + 1
    return torch.cat(outputs)
