"""Speeds learned from what has run: of prefill, of decode, of the parts of a step. Pure."""

from __future__ import annotations

from dataclasses import replace

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

    def observe_step(self, work: StepWork, step_s: float, *, drafted: int = 0) -> None:
        """One step that has run. drafted: of its decoding sequences, how many were guesses.

        A step's speed is told as if it had drafted nothing: that is what requests can count on.
        """
        self.steps.observe(work, step_s)
        if drafted:
            plain = _without_drafts(work, drafted)
            costs = self.steps.latest_costs
            step_s *= costs.seconds(plain) / max(costs.seconds(work), 1e-9)
            work = plain
        self.observe(work.prefill_tokens, work.decode_sequences, step_s)

    def token_budget(self, most: int, target_step_s: float) -> int:
        """Tokens of a step that is to take `target_step_s`, at most `most`."""
        return min(most, max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_s * target_step_s)))


def _without_drafts(work: StepWork, drafted: int) -> StepWork:
    """The same with fewer decoding sequences, of the mean context."""
    left = work.decode_sequences - drafted
    context_tokens = work.context_tokens * left // work.decode_sequences
    return replace(work, decode_sequences=left, context_tokens=context_tokens)
