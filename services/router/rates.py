"""What is learned beyond what the workers say themselves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_SLOPE_WEIGHT = 0.1
# Share of an idle step that one more sequence adds, before it has been measured.
_SLOPE_SHARE = 0.03


@dataclass(slots=True)
class StepSlope:
    """Seconds that each further sequence adds to a decode step: a running mean over reports with two or more."""

    value_s: float = -1.0

    def update(self, idle_step_s: float, step_s: float, sequences: int) -> float:
        """The slope after a report of a decode step of `step_s` at `sequences`."""
        if sequences >= 2 and step_s > 0:
            measured_s = max(0.0, step_s - idle_step_s) / (sequences - 1)
            self.value_s = (
                measured_s if self.value_s < 0 else self.value_s + _SLOPE_WEIGHT * (measured_s - self.value_s)
            )
        return self.value_s if self.value_s >= 0 else _SLOPE_SHARE * idle_step_s
