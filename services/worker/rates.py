"""Speeds learned from what has run: of prefill, of decode, of the parts of a step. Pure."""

from __future__ import annotations

from services.common.learned_speed import LearnedSpeed
from services.common.step_costs import StepWork, assumed_costs
from services.worker.step_fit import StepFit

# Larger than what is observed, or a rate that has fallen so far would never be learned anew.
_MIN_STEP_TOKENS = 64


class Rates(LearnedSpeed):
    """Started with the self-benchmark's figures."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        super().__init__(prefill_tokens_per_s, decode_step_s)
        self.steps = StepFit(assumed_costs(prefill_tokens_per_s or 1000.0, decode_step_s))

    def observe_step(self, work: StepWork, step_s: float) -> None:
        """One step that has run."""
        self.steps.observe(work, step_s)
        self.observe(work.prefill_tokens, work.decode_sequences, step_s)

    def token_budget(self, most: int, target_step_s: float) -> int:
        """Tokens of a step that is to take `target_step_s`, at most `most`."""
        return min(most, max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_s * target_step_s)))
