"""Copies blocks between a pool on a device and the staging area in host memory that the mover sees.

A gather collects scattered blocks into a buffer on the device, laid out as they travel, and copies it to staging; a
scatter is the reverse. Both are launches on lanes of their own and never wait. Order: a scatter comes after every step
submitted before it and before every step after it (`before_step`), so that a pulled block is never read before it is
there, and a slot that changes hands is not written while a step of its last owner runs. A gather comes after every
scatter begun before it; the steps that wrote its blocks have been collected, and nobody writes to them until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels import block_copy
from services.worker.model.device.timeline import DONE, Mark, Timeline
from services.worker.model.kv_pool import KvPool

# Of the buffers on the device, one for each direction.
BUFFER_BYTES = 64 * 2**20


class PoolCopier:
    """BlockCopier between `pool` and `staging`: uint8 [slots, block_bytes] in host memory, pinned where it can be."""

    def __init__(
        self, pool: KvPool, staging: torch.Tensor, timeline: Timeline, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        if staging.shape[1] != pool.layout.block_bytes:
            raise ValueError(f"staging slots of {staging.shape[1]} bytes for blocks of {pool.layout.block_bytes}")
        self._pool = pool
        self._staging = staging
        self._timeline = timeline
        self._rows = min(len(staging), max(1, buffer_bytes // pool.layout.block_bytes))
        device = pool.blocks.device
        self._out, self._in = (
            torch.empty(self._rows, staging.shape[1], dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._copies = _copies(device)
        self._last_scatter: Mark = DONE

    def gather(self, pool_slots: Sequence[int], staging_slots: Sequence[int]) -> Mark:
        """See BlockCopier."""
        self._timeline.after("out", self._last_scatter)
        with self._timeline.on("out"):
            for chosen, runs in self._portions(pool_slots, staging_slots):
                self._copies.gather(self._pool.blocks, chosen, self._out[: len(chosen)], kv_scales=self._pool.scales)
                for start, slot, count in runs:
                    self._staging[slot : slot + count].copy_(self._out[start : start + count], non_blocking=True)
        return self._timeline.mark("out")

    def scatter(self, staging_slots: Sequence[int], pool_slots: Sequence[int]) -> Mark:
        """See BlockCopier."""
        self._timeline.after("in", self._timeline.mark("steps"))
        with self._timeline.on("in"):
            for chosen, runs in self._portions(pool_slots, staging_slots):
                for start, slot, count in runs:
                    self._in[start : start + count].copy_(self._staging[slot : slot + count], non_blocking=True)
                self._copies.scatter(self._pool.blocks, chosen, self._in[: len(chosen)], kv_scales=self._pool.scales)
        self._last_scatter = self._timeline.mark("in")
        return self._last_scatter

    def before_step(self) -> None:
        """A step is about to be submitted: it comes after every scatter begun so far."""
        self._timeline.after("steps", self._last_scatter)

    def _portions(
        self, pool_slots: Sequence[int], staging_slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Portions that fit the buffer: pool slots int32 [n] on the device, and adjoining staging slots as
        (first row of the buffer, first slot, count)."""
        for first in range(0, len(pool_slots), self._rows):
            wanted = pool_slots[first : first + self._rows]
            chosen = torch.tensor(wanted, dtype=torch.int32, device=self._out.device)
            yield chosen, adjoining(staging_slots[first : first + self._rows])


class _Copy(Protocol):
    def __call__(
        self, pool: torch.Tensor, slots: torch.Tensor, staging: torch.Tensor, *, kv_scales: torch.Tensor | None
    ) -> None:
        """As kernels/block_copy.py says."""


@dataclass(frozen=True, slots=True)
class _Copies:
    gather: _Copy
    scatter: _Copy


def _copies(device: torch.device) -> _Copies:
    """One launch on a GPU; on CPU the reference, which needs no Triton."""
    if device.type == "cuda":
        from kernels.triton import block_copy as triton_copy

        return _Copies(triton_copy.gather_blocks, triton_copy.scatter_blocks)
    return _Copies(block_copy.gather_blocks, block_copy.scatter_blocks)


def adjoining(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive slots as (index of the first, first slot, count)."""
    runs: list[tuple[int, int, int]] = []
    for index, slot in enumerate(slots):
        if runs and slot == runs[-1][1] + runs[-1][2]:
            start, first, count = runs[-1]
            runs[-1] = start, first, count + 1
        else:
            runs.append((index, slot, 1))
    return runs
