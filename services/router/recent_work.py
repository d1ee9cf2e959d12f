"""How much work was granted to each worker of late, in buckets of time. Pure; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.policies.view import FloatArray, IntArray

# Together the three minutes that Preble looks back.
BUCKET_S = 10.0
NUM_BUCKETS = 18


@dataclass(frozen=True, slots=True)
class Recent:
    """One element for each row asked for: seconds of work, seconds of prefill in them, grants; in the last lasted_s."""

    work_s: FloatArray
    prefill_s: FloatArray
    grants: FloatArray
    lasted_s: float


class RecentWork:
    """Sums by row and bucket. Rows come into being when they are first counted."""

    def __init__(self) -> None:
        # [bucket, kind, row]; kinds as in Recent.
        self._sums = np.zeros((NUM_BUCKETS, 3, 16))
        self._bucket = 0
        self._began_s: float | None = None

    def add(self, row: int, now_s: float, *, work_s: float, prefill_s: float) -> None:
        """Count a grant."""
        self._turn(now_s)
        size = self._sums.shape[2]
        if row >= size:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, max(row + 1 - size, size))))
        self._sums[self._bucket % NUM_BUCKETS, :, row] += (work_s, prefill_s, 1.0)

    def forget(self, row: int) -> None:
        """The row will be another worker's."""
        self._sums[:, :, row : row + 1] = 0.0

    def totals(self, rows: IntArray, now_s: float, *, num_buckets: int = NUM_BUCKETS) -> Recent:
        """Of the last buckets, the present one among them."""
        self._turn(now_s)
        began_s = now_s if self._began_s is None else self._began_s
        buckets = [(self._bucket - back) % NUM_BUCKETS for back in range(num_buckets)]
        sums = np.append(self._sums[buckets].sum(axis=0), np.zeros((3, 1)), axis=1)
        work_s, prefill_s, grants = sums[:, np.minimum(rows, sums.shape[1] - 1)]
        lasted_s = now_s - max(began_s, (self._bucket - num_buckets + 1) * BUCKET_S)
        return Recent(work_s, prefill_s, grants, lasted_s)

    def _turn(self, now_s: float) -> None:
        """Empty the buckets that begin."""
        bucket = int(now_s // BUCKET_S)
        if self._began_s is None:
            self._began_s, self._bucket = now_s, bucket
        for begun in range(max(self._bucket + 1, bucket - NUM_BUCKETS + 1), bucket + 1):
            self._sums[begun % NUM_BUCKETS] = 0.0
        self._bucket = max(self._bucket, bucket)
