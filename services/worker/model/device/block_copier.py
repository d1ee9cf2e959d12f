"""Copies blocks between a pool on a device and the staging area in host memory that the mover sees.

A gather collects scattered blocks into a buffer on the device, laid out as they travel, and copies it to staging; a
scatter is the reverse. Both are launches on lanes of their own and never wait. Order: a scatter comes after every step
submitted before it and before every step after it (`before_step`), so that a pulled block is never read before it is
there, and a slot that changes hands is not written while a step of its last owner runs. A gather comes after every
scatter begun before it; the steps that wrote its blocks have been collected, and nobody writes to them until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

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
        self._parts = pool.head_bytes()
        self._staging = staging.view(len(staging), pool.layout.num_kv_heads, -1)
        self._timeline = timeline
        self._rows = min(len(staging), max(1, buffer_bytes // pool.layout.block_bytes))
        device = pool.blocks.device
        self._out, self._in = (
            torch.empty(self._rows, *self._staging.shape[1:], dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._last_scatter: Mark = DONE

    def gather(self, pool_slots: Sequence[int], staging_slots: Sequence[int]) -> Mark:
        """See BlockCopier."""
        self._timeline.after("out", self._last_scatter)
        with self._timeline.on("out"):
            for chosen, runs in self._portions(pool_slots, staging_slots):
                first = 0
                for part in self._parts:
                    end = first + part.shape[2]
                    self._out[: len(chosen), :, first:end] = part[chosen]
                    first = end
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
                first = 0
                for part in self._parts:
                    end = first + part.shape[2]
                    part[chosen] = self._in[: len(chosen), :, first:end]
                    first = end
        self._last_scatter = self._timeline.mark("in")
        return self._last_scatter

    def before_step(self) -> None:
        """A step is about to be submitted: it comes after every scatter begun so far."""
        self._timeline.after("steps", self._last_scatter)

    def _portions(
        self, pool_slots: Sequence[int], staging_slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Portions that fit the buffer: pool slots int64 [n] on the device, and adjoining staging slots as
        (first row of the buffer, first slot, count)."""
        for first in range(0, len(pool_slots), self._rows):
            wanted = pool_slots[first : first + self._rows]
            chosen = torch.tensor(wanted, device=self._out.device)
            yield chosen, adjoining(staging_slots[first : first + self._rows])


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
