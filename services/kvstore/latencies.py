"""A bounded record of durations that answers quantiles. Pure.

Buckets grow by the square root of two from ten microseconds to two minutes, so that a quantile in between is at most
42% too high and never too low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST_S = 1e-5
_GROWTH = math.sqrt(2)
_NUM_BUCKETS = 48


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """Of one moment. Quantiles are seconds, 0 where there was nothing."""

    count: int
    p50_s: float
    p99_s: float


class Latencies:
    """Durations since start."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS

    def record(self, duration_s: float) -> None:
        """One more."""
        bucket = math.ceil(math.log(max(duration_s, _FIRST_S) / _FIRST_S, _GROWTH) - 1e-9)
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += 1

    def statistics(self) -> LatencyStatistics:
        """A snapshot."""
        return LatencyStatistics(sum(self._counts), self._quantile(0.5), self._quantile(0.99))

    def _quantile(self, share: float) -> float:
        wanted = share * sum(self._counts)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(_FIRST_S * _GROWTH**bucket)
        return 0.0
