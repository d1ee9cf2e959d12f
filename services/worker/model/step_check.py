"""Check a step's arrays before anything is computed: a step that disagrees with itself must not touch the pool."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from kernels.batch import BLOCK_TOKENS, PagedBatch
from services.worker.model.step import StepInput


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may refer to."""

    vocab_size: int
    num_blocks: int
    max_context: int
    adapter_slots: int = 0


def checked_batch(step: StepInput, limits: StepLimits) -> PagedBatch:
    """The step as the kernels read it, in copies of its arrays. Raises ValueError naming what disagrees."""
    arrays = {}
    for field in fields(StepInput):
        array = getattr(step, field.name)
        if array is None and field.name == "adapters":
            continue
        dimensions = 2 if field.name == "block_tables" else 1
        _require(isinstance(array, np.ndarray) and array.dtype == np.int32, f"{field.name} is not an int32 array")
        _require(array.ndim == dimensions, f"{field.name} has {array.ndim} dimensions instead of {dimensions}")
        arrays[field.name] = np.array(array, order="C")
    batch = PagedBatch(**arrays)
    _check_shapes(batch)
    _check_sequences(batch, limits)
    _check_blocks(batch, limits)
    _check_adapters(batch, limits)
    return batch


def _require(condition: bool | np.bool_, problem: str) -> None:
    if not condition:
        raise ValueError(f"malformed step: {problem}")


def _check_shapes(batch: PagedBatch) -> None:
    tokens, seqs = len(batch.token_ids), len(batch.context_lens)
    _require(tokens > 0 and seqs > 0, "no tokens")
    _require(len(batch.positions) == tokens, f"{len(batch.positions)} positions for {tokens} tokens")
    _require(len(batch.query_starts) == seqs + 1, f"{len(batch.query_starts)} query_starts for {seqs} sequences")
    _require(len(batch.block_tables) == seqs, f"{len(batch.block_tables)} block tables for {seqs} sequences")


def _check_adapters(batch: PagedBatch, limits: StepLimits) -> None:
    if batch.adapters is None:
        return
    seqs, slots = len(batch.context_lens), limits.adapter_slots
    _require(len(batch.adapters) == seqs, f"{len(batch.adapters)} adapters for {seqs} sequences")
    _require(_within(batch.adapters + 1, slots + 1), f"adapters outside the {slots} slots")


def _check_sequences(batch: PagedBatch, limits: StepLimits) -> None:
    """Each sequence's tokens are the last ones of its context, in order."""
    tokens, starts = batch.num_tokens, batch.query_starts
    lengths = np.diff(starts)
    _require(starts[0] == 0 and starts[-1] == tokens and lengths.min() > 0, "query_starts do not divide the tokens")
    _require(batch.context_lens.max() <= limits.max_context, f"context longer than the {limits.max_context} served")
    _require((batch.context_lens >= lengths).all(), "context_lens shorter than the queries")
    expected = np.arange(tokens) + np.repeat(batch.context_lens - starts[1:], lengths)
    _require((batch.positions == expected).all(), "positions are not the last ones of each context")
    _require(_within(batch.token_ids, limits.vocab_size), f"token_ids outside the vocabulary of {limits.vocab_size}")
    _require(_within(batch.logit_rows, tokens), f"logit_rows outside the {tokens} tokens")


def _check_blocks(batch: PagedBatch, limits: StepLimits) -> None:
    """Every block of a context has a slot, and no two tokens of the step are written to the same place."""
    width = batch.block_tables.shape[1]
    used = np.arange(width) < (batch.context_lens[:, None] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    _require(batch.context_lens.max() <= width * BLOCK_TOKENS, "block_tables too narrow for context_lens")
    _require(
        _within(batch.block_tables[used], limits.num_blocks), f"block_tables outside the {limits.num_blocks} slots"
    )
    seqs = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    places = batch.block_tables[seqs, batch.positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
    places += batch.positions % BLOCK_TOKENS
    _require(len(np.unique(places)) == len(places), "two tokens are written to the same place of the pool")


def _within(values: np.ndarray[tuple[int, ...], np.dtype[np.int32]], limit: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < limit)
