"""Captured decode steps: at which shapes, and a step of such a shape from its arrays to its logits.

A decode step has one token of each sequence. It is captured for a few numbers of sequences and a few lengths of
context, and runs at the smallest shape that holds it, padded. On CPU, where there is nothing to capture, the same
launches run again from the same buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch
from kernels.triton.device_batch import BatchShape, DeviceBatch, pack
from services.worker.model.device.step_buffers import StepBuffers

# What runs the launches of a step again, writing to the same logits.
Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
_SHORTEST_CONTEXT = 2048
_CONTEXT_FACTOR = 4


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32 and on in steps of about a third, and `most`: little is padded, few are captured."""
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    step = 8
    size = 16
    while size < most:
        sizes.append(size)
        if size >= 4 * step:
            step *= 2
        size += step
    return [*sizes, most]


def context_lengths(most: int) -> list[int]:
    """2048 and on in steps of four, and `most`: how attention is split follows from the longest context."""
    lengths = []
    length = _SHORTEST_CONTEXT
    while length < most:
        lengths.append(length)
        length *= _CONTEXT_FACTOR
    return [*lengths, most]


def smallest(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of the ascending `sizes` that is not below `wanted`."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class _Captured:
    shape: BatchShape
    words: torch.Tensor
    logits: torch.Tensor
    replay: Replay


class DecodeGraphs:
    """The captured steps of a decoder over its pool."""

    def __init__(self, max_seqs: int, max_context: int) -> None:
        self._sizes = batch_sizes(max_seqs)
        self._contexts = context_lengths(max_context)
        self._captured: dict[tuple[int, int], _Captured] = {}

    def capture(self, run: Callable[[DeviceBatch], torch.Tensor], capture: Capture, device: torch.device) -> None:
        """Capture every shape, largest first, so that later ones find room in its memory."""
        for context in reversed(self._contexts):
            for size in reversed(self._sizes):
                self._captured[size, context] = _captured(run, capture, device, size, context)

    def run(self, batch: PagedBatch, buffers: StepBuffers) -> torch.Tensor | None:
        """The step's logits, to be read before the next step; None where no captured shape holds it."""
        seqs = len(batch.context_lens)
        if batch.num_tokens != seqs or len(batch.logit_rows) > seqs:
            return None
        size = smallest(self._sizes, seqs)
        context = smallest(self._contexts, int(batch.context_lens.max()))
        found = self._captured.get((size, context)) if size and context else None
        if found is None:
            return None
        buffers.fill(narrowed(batch, found.shape.table_width), found.shape, found.words)
        found.replay()
        return found.logits[: len(batch.logit_rows)]


def narrowed(batch: PagedBatch, width: int) -> PagedBatch:
    """The batch without table columns beyond `width`, which its contexts do not reach."""
    if batch.block_tables.shape[1] <= width:
        return batch
    return PagedBatch(
        batch.token_ids,
        batch.positions,
        batch.query_starts,
        batch.context_lens,
        np.ascontiguousarray(batch.block_tables[:, :width]),
        batch.logit_rows,
    )


def _captured(
    run: Callable[[DeviceBatch], torch.Tensor], capture: Capture, device: torch.device, size: int, context: int
) -> _Captured:
    shape = BatchShape(size, size, -(-context // BLOCK_TOKENS), size)
    host = torch.zeros(shape.num_words, dtype=torch.int32)
    pack(_nothing(), shape, host.numpy())
    words = host.to(device)
    batch = DeviceBatch.over(words, shape, max_query_len=1, max_context_len=context)
    logits, replay = capture(lambda: run(batch))
    return _Captured(shape, words, logits, replay)


def _nothing() -> PagedBatch:
    """A batch of no sequence: all that is captured over is padding, which is written nowhere."""
    none = np.zeros(0, dtype=np.int32)
    return PagedBatch(none, none, np.zeros(1, dtype=np.int32), none, np.zeros((0, 1), dtype=np.int32), none)


def run_again(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
    """Capture of a CPU: each replay runs the step."""
    logits = step()

    def replay() -> None:
        logits.copy_(step())

    return logits, replay


class CudaCapture:
    """Capture of a GPU. All graphs share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Run once, so that kernels are compiled and loaded, then capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits = step()
        return logits, graph.replay
