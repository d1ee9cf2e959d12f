"""Speeds learned from what has run: prefill and decode. Pure arithmetic on observed figures."""

from __future__ import annotations

from services.common.step_costs import StepWork, assumed_costs
from services.worker.step_fit import StepFit

# Weight of the newest observation: a change of speed shows within ten steps, one slow step moves it by a fifth.
_WEIGHT = 0.2
# Steps with fewer prefill tokens say little about the speed of prefill.
_MIN_OBSERVED_TOKENS = 32
# Larger than what is observed, or a rate that has fallen so far would never be learned anew.
_MIN_STEP_TOKENS = 64


class Rates:
    """Exponentially weighted means, started with the self-benchmark's figures."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s
        self.steps = StepFit(assumed_costs(prefill_tokens_per_s or 1000.0, decode_step_s))

    def observe_step(self, work: StepWork, step_s: float) -> None:
        """One step that has run. Decode rows in it cost about what prefill tokens do."""
        prefill_tokens, decode_rows = work.prefill_tokens, work.decode_sequences
        self.steps.observe(work, step_s)
        if prefill_tokens >= _MIN_OBSERVED_TOKENS:
            rate = (prefill_tokens + decode_rows) / max(step_s, 1e-6)
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, rate)
        elif not prefill_tokens and decode_rows:
            self.decode_step_s = _mean(self.decode_step_s, step_s)

    def token_budget(self, most: int, target_step_s: float) -> int:
        """Tokens of a step that is to take `target_step_s`, at most `most`."""
        return min(most, max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_s * target_step_s)))


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
