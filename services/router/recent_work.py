"""How much work was granted to each worker of late, in buckets of time. Pure; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.policies.view import FloatArray
from services.router.worker_rows import Selection

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
        # Of so many last buckets, [kind, row].
        self._totals: dict[int, FloatArray] = {}
        self._bucket = 0
        self._began_s: float | None = None

    def add(self, row: int, now_s: float, *, work_s: float, prefill_s: float) -> None:
        """Count a grant."""
        self._turn(now_s)
        self._hold(row + 1)
        grant = (work_s, prefill_s, 1.0)
        self._sums[self._bucket % NUM_BUCKETS, :, row] += grant
        for total in self._totals.values():
            total[:, row] += grant

    def forget(self, row: int) -> None:
        """The row will be another worker's."""
        self._sums[:, :, row : row + 1] = 0.0
        self._totals.clear()

    def totals(self, selection: Selection, now_s: float, *, num_buckets: int = NUM_BUCKETS) -> Recent:
        """Of the last buckets, the present one among them."""
        self._turn(now_s)
        self._hold(int(selection.rows[-1]) + 1 if len(selection.rows) else 0)
        total = self._totals.get(num_buckets)
        if total is None:
            buckets = [(self._bucket - back) % NUM_BUCKETS for back in range(num_buckets)]
            total = self._totals[num_buckets] = self._sums[buckets].sum(axis=0)
        began_s = now_s if self._began_s is None else self._began_s
        lasted_s = now_s - max(began_s, (self._bucket - num_buckets + 1) * BUCKET_S)
        work_s, prefill_s, grants = total[:, selection.at]
        return Recent(work_s, prefill_s, grants, lasted_s)

    def _hold(self, size: int) -> None:
        """At least so many rows."""
        before = self._sums.shape[2]
        if size > before:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, max(size - before, before))))
            self._totals.clear()

    def _turn(self, now_s: float) -> None:
        """Empty the buckets that begin."""
        bucket = int(now_s // BUCKET_S)
        if self._began_s is None:
            self._began_s, self._bucket = now_s, bucket
        if bucket <= self._bucket:
            return
        for begun in range(max(self._bucket + 1, bucket - NUM_BUCKETS + 1), bucket + 1):
            self._sums[begun % NUM_BUCKETS] = 0.0
        self._bucket = bucket
        self._totals.clear()
