"""A sum whose parts fade, and with it the rate at which something happens of late. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class DecayingSum:
    """tau_s: time constant with which parts fade. least_seen_s: what was seen for less makes no higher rate."""

    tau_s: float
    least_seen_s: float = 0.1
    value: float = 0.0
    at_s: float | None = None
    began_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Count `amount` now. now_s: any clock, the same in all calls."""
        self.value = self.at(now_s) + amount
        if self.at_s is None:
            self.began_s = now_s
        self.at_s = now_s

    def at(self, now_s: float) -> float:
        """What is left of the sum."""
        return 0.0 if self.at_s is None else self.value * math.exp(-max(0.0, now_s - self.at_s) / self.tau_s)

    def rate(self, now_s: float) -> float:
        """Per second, also while the first time constant is not over; 0 before anything was counted."""
        seen_s = max(self.least_seen_s, now_s - self.began_s)
        # Divided by what a constant rate of 1/s would have left by now.
        return self.at(now_s) / (self.tau_s * -math.expm1(-seen_s / self.tau_s))
