"""How fast a worker prefills and decodes, learned from the steps that it has run. Pure.

Workers and the simulator share it, so that a simulated worker reports what a real one would have.
"""

from __future__ import annotations

from services.common.running_mean import RunningMean

# Weight of the newest observation: a change of speed shows within ten steps, one slow step moves it by a fifth.
_WEIGHT = 0.2
# Steps with fewer prefill tokens say little about the speed of prefill.
_MIN_OBSERVED_TOKENS = 32
_MIN_STEP_S = 1e-6


class LearnedSpeed:
    """Running means, started with the self-benchmark's figures; those that are 0 give way to the first observation."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._prefill = RunningMean(prefill_tokens_per_s, _WEIGHT)
        self._decode = RunningMean(decode_step_s, _WEIGHT)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of steps that prefill."""
        return self._prefill.value

    @property
    def decode_step_s(self) -> float:
        """Of steps that only decode."""
        return self._decode.value

    def observe(self, prefill_tokens: int, decode_rows: int, step_s: float, steps: int = 1) -> None:
        """So many equal steps have run. Decode rows in a step that prefills cost about what prefill tokens do."""
        if prefill_tokens >= _MIN_OBSERVED_TOKENS:
            _learn(self._prefill, (prefill_tokens + decode_rows) / max(step_s, _MIN_STEP_S), steps)
        elif not prefill_tokens and decode_rows:
            _learn(self._decode, step_s, steps)


def _learn(mean: RunningMean, sample: float, times: int) -> None:
    mean.value = mean.value or sample
    mean.update(sample, times)
