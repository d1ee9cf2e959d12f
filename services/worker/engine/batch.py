"""Builds a step's arrays for the runner from scheduled chunks, in buffers that are used again for each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.common.blocks import BLOCK_TOKENS
from services.worker.chunk import Chunk
from services.worker.model.step import StepInput


class StepBuilder:
    """The StepInput of a list of chunks; valid until the next call."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int32)
        self._positions = np.empty(0, dtype=np.int32)
        self._tables = np.empty((0, 0), dtype=np.int32)

    def build(self, chunks: Sequence[Chunk]) -> StepInput:
        """One sequence for each chunk; logits of as many last tokens of each as it draws, then of those it scores."""
        lengths = [chunk.length for chunk in chunks]
        starts = np.array(list(accumulate(lengths, initial=0)), dtype=np.int32)
        ends = np.array([chunk.start + chunk.length for chunk in chunks], dtype=np.int32)
        width = -(-int(ends.max()) // BLOCK_TOKENS)
        self._reserve(int(starts[-1]), len(chunks), width)
        tokens, positions, tables = self._tokens, self._positions, self._tables
        # Decodes come first and are one token each.
        decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))
        tokens[:decodes] = [chunk.sequence.tokens[chunk.start] for chunk in chunks[:decodes]]
        positions[:decodes] = ends[:decodes] - 1
        for index in range(decodes, len(chunks)):
            chunk, first, end = chunks[index], starts[index], starts[index + 1]
            tokens[first:end] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            positions[first:end] = np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32)
        for row, chunk in zip(tables, chunks, strict=False):
            table = chunk.sequence.table
            row[: len(table)] = table[:width]
            row[len(table) :] = -1
        rows = [
            row
            for chunk, end in zip(chunks, starts[1:].tolist(), strict=True)
            for row in range(end - chunk.num_draws, end)
        ]
        rows += [first + row for chunk, first in zip(chunks, starts.tolist(), strict=False) for row in chunk.read_rows]
        logit_rows = np.array(rows, dtype=np.int32)
        return StepInput(
            tokens[: starts[-1]],
            positions[: starts[-1]],
            starts,
            ends,
            tables[: len(chunks)],
            logit_rows,
            _adapters(chunks),
        )

    def _reserve(self, num_tokens: int, num_rows: int, num_blocks: int) -> None:
        if num_tokens > len(self._tokens):
            self._tokens = np.empty(num_tokens * 2, dtype=np.int32)
            self._positions = np.empty(num_tokens * 2, dtype=np.int32)
        if num_rows > self._tables.shape[0] or num_blocks != self._tables.shape[1]:
            self._tables = np.empty((max(num_rows, self._tables.shape[0]), num_blocks), dtype=np.int32)


def _adapters(chunks: Sequence[Chunk]) -> npt.NDArray[np.int32] | None:
    slots = [chunk.sequence.request.adapter_slot for chunk in chunks]
    return np.array(slots, dtype=np.int32) if max(slots) >= 0 else None
