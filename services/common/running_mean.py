"""An exponentially weighted mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RunningMean:
    """value: what is assumed before the first sample. weight: of the newest sample."""

    value: float
    weight: float = 0.05

    def update(self, sample: float, times: int = 1) -> None:
        """Take one sample in, as often as it came in a row."""
        weight = self.weight if times == 1 else 1.0 - (1.0 - self.weight) ** times
        self.value += weight * (sample - self.value)
