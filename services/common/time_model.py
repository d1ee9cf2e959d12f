"""How long a model's step takes, in closed form: for simulated workers and for whoever plans with them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeModel:
    """A worker's speed.

    A step that computes prompt tokens and decodes takes the prompt tokens' time and the decodes' time together; a step
    without decodes has no decode time. context_s: for each token of context that a decoding sequence attends to.
    """

    prefill_tokens_per_s: float
    decode_step_s: float
    decode_sequence_s: float
    context_s: float = 0.0

    def step_s(self, prefill_tokens: int, decode_sequences: int, context_tokens: int = 0) -> float:
        """Seconds of one step. context_tokens: of all decoding sequences together."""
        prefill_s = prefill_tokens / self.prefill_tokens_per_s
        if not decode_sequences:
            return prefill_s
        return (
            prefill_s + self.decode_step_s + self.decode_sequence_s * decode_sequences + self.context_s * context_tokens
        )
