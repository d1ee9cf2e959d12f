"""A token bucket: so much at once, and so much per second in the long run. Pure."""

from __future__ import annotations


class TokenBucket:
    """Begins full. The level may go below zero, where more was used than had been asked for."""

    def __init__(self, capacity: float, per_s: float, level: float | None = None) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self.level = capacity if level is None else min(level, capacity)
        self._at_s: float | None = None

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount`, or all that the bucket holds where that is less, is there; 0: now.

        now_s: any clock, the same in all calls.
        """
        self._refill(now_s)
        missing = min(amount, self.capacity) - self.level
        return missing / self.per_s if missing > 1e-9 else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Use `amount`; negative: give it back."""
        self._refill(now_s)
        self.level = min(self.capacity, self.level - amount)

    def is_full(self, now_s: float) -> bool:
        """Whether nothing is owed."""
        self._refill(now_s)
        return self.level >= self.capacity

    def _refill(self, now_s: float) -> None:
        if self._at_s is not None:
            self.level = min(self.capacity, self.level + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
