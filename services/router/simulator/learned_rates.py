"""What a worker would have learned of its own speed, many equal steps at a time. Pure."""

from __future__ import annotations

# As in the worker: weight of the newest observation, and the fewest prompt tokens that say anything of prefill.
_WEIGHT = 0.2
_MIN_OBSERVED_TOKENS = 32


class LearnedRates:
    """Exponentially weighted means, started with the self-benchmark's figures."""

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_step_s = decode_step_s

    def observe(self, prefill_tokens: int, decode_rows: int, step_s: float, steps: int) -> None:
        """`steps` equal steps have run."""
        if prefill_tokens >= _MIN_OBSERVED_TOKENS:
            rate = (prefill_tokens + decode_rows) / step_s
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, rate, steps)
        elif not prefill_tokens and decode_rows:
            self.decode_step_s = _mean(self.decode_step_s, step_s, steps)


def _mean(old: float, new: float, times: int) -> float:
    return new + (old - new) * (1.0 - _WEIGHT) ** times
