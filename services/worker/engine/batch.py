"""Builds a step's arrays for the runner from scheduled chunks, in buffers that are used again for each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.blocks import BLOCK_TOKENS
from services.worker.model.step import StepInput
from services.worker.scheduler import Chunk


class StepBuilder:
    """The StepInput of a list of chunks; valid until the next call."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int32)
        self._positions = np.empty(0, dtype=np.int32)
        self._tables = np.empty((0, 0), dtype=np.int32)

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """One sequence for each chunk, logits of the last token of each chunk that draws."""
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum([chunk.length for chunk in chunks], out=starts[1:])
        ends = np.array([chunk.start + chunk.length for chunk in chunks], dtype=np.int32)
        self._reserve(int(starts[-1]), len(chunks), -(-int(ends.max()) // BLOCK_TOKENS))
        tokens, positions = self._tokens[: starts[-1]], self._positions[: starts[-1]]
        tables = self._tables[: len(chunks)]
        tables.fill(-1)
        first = 0
        for index, chunk in enumerate(chunks):
            sequence, start, end = chunk.sequence, chunk.start, first + chunk.length
            tokens[first:end] = sequence.tokens[start : start + chunk.length]
            positions[first:end] = np.arange(start, start + chunk.length)
            blocks = min(len(sequence.slots), tables.shape[1])
            tables[index, :blocks] = sequence.table[:blocks]
            first = end
        draws = np.array([chunk.draws for chunk in chunks])
        return StepInput(tokens, positions, starts, ends, tables, starts[1:][draws] - 1)

    def _reserve(self, num_tokens: int, num_rows: int, num_blocks: int) -> None:
        if num_tokens > len(self._tokens):
            self._tokens = np.empty(num_tokens * 2, dtype=np.int32)
            self._positions = np.empty(num_tokens * 2, dtype=np.int32)
        if num_rows > self._tables.shape[0] or num_blocks != self._tables.shape[1]:
            self._tables = np.empty((max(num_rows, self._tables.shape[0]), num_blocks), dtype=np.int32)
