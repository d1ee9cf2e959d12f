"""A run of steps of the same composition, which a simulated worker takes in closed form. Pure; times in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.router.simulator.job import Job

# Step borders are sums of floats.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Segment:
    """`steps` steps of step_s each from start_s; none: the worker is idle.

    chunks: in each step, prompts and how many of their tokens it computes.
    """

    start_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0
    chunks: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When its results are there; infinite for none."""
        return self.start_s + self.steps * self.step_s if self.steps else math.inf

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of a step."""
        return sum(tokens for _, tokens in self.chunks)

    def steps_done(self, now_s: float) -> int:
        """Whole steps by now."""
        if not self.steps:
            return 0
        return min(self.steps, max(0, int((now_s - self.start_s) / self.step_s + _SLACK)))

    def steps_begun(self, now_s: float) -> int:
        """Steps by the end of the one that runs now; at least one, unless there is none."""
        if not self.steps:
            return 0
        return max(1, min(self.steps, math.ceil((now_s - self.start_s) / self.step_s - _SLACK)))
