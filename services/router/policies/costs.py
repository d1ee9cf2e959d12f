"""What a request would cost on each candidate, in seconds: the terms of the predicted time to first token.

    predicted TTFT = queue + pull + prefill + interference

Blocks are moved where moving is predicted to be faster than computing (`pulls`). All rates are the workers' own,
learned online.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.policies.pulls import PullPlans, best_plans
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, PolicyView


@dataclass(frozen=True, slots=True)
class Costs:
    """One element for each candidate."""

    queue_s: FloatArray
    pull_s: FloatArray
    prefill_s: FloatArray
    interference_s: FloatArray
    # Time that this request takes from those already there.
    harm_s: FloatArray
    # Mean time of each token after the first.
    predicted_tpot_s: FloatArray
    prefill_tokens: IntArray
    pull: PullPlans

    @property
    def predicted_ttft_s(self) -> FloatArray:
        """Seconds from the decision to the first token."""
        return self.queue_s + self.pull_s + self.prefill_s + self.interference_s

    def terms(self) -> dict[str, FloatArray]:
        """For the explanation; not summed: what of pull_s is waiting at holders, and the prefill that pulls save."""
        return {
            "queue_s": self.queue_s,
            "pull_s": self.pull_s,
            "prefill_s": self.prefill_s,
            "interference_s": self.interference_s,
            "harm_s": self.harm_s,
            "predicted_tpot_s": self.predicted_tpot_s,
            "pull_queue_s": self.pull.queue_s,
            "saved_prefill_s": self.pull.alone_s - self.prefill_s,
        }


def estimate(request: PolicyRequest, view: PolicyView) -> Costs:
    """Costs of `request` on every candidate."""
    rows = view.rows
    pull = best_plans(request, view)
    tokens = request.prompt_tokens - pull.end * request.block_tokens
    queued = rows["queued_tokens"] + rows["pending_tokens"]
    steps = np.ceil((queued + tokens) / rows["step_token_budget"])
    return Costs(
        queue_s=queued / rows["prefill_tokens_per_s"] + _slot_wait_s(request, view),
        pull_s=pull.seconds,
        prefill_s=pull.prefill_s,
        interference_s=np.where(rows["decoding"] > 0, steps * rows["decode_step_s"], 0.0),
        harm_s=_harm_s(request, view),
        predicted_tpot_s=rows["decode_step_s"] + rows["decode_slope_s"] * (rows["pending"] + request.num_choices),
        prefill_tokens=tokens,
        pull=pull,
    )


def _slot_wait_s(request: PolicyRequest, view: PolicyView) -> FloatArray:
    """Wait for a place in the batch, or for blocks: each running sequence holds its own for an output's time."""
    rows = view.rows
    in_line = rows["running"] + rows["waiting"] + rows["pending"] + request.num_choices
    service_s = request.expected_output_tokens * rows["decode_step_s"]
    for_slot_s = np.maximum(0.0, in_line - rows["max_running"]) / rows["max_running"] * service_s
    needed = np.ceil(request.prompt_tokens / request.block_tokens) - view.local_blocks
    lacking = needed + rows["pending_blocks"] - rows["free_blocks"]
    for_blocks_s = np.where(lacking > 0, service_s / np.maximum(1.0, rows["running"]), 0.0)
    result: FloatArray = np.maximum(for_slot_s, for_blocks_s)
    return result


def _harm_s(request: PolicyRequest, view: PolicyView) -> FloatArray:
    """Each step of this request's output makes everybody's longer by the slope of the step time."""
    rows = view.rows
    others = rows["decoding"] + rows["waiting"] + rows["pending"]
    result: FloatArray = request.expected_output_tokens * request.num_choices * rows["decode_slope_s"] * others
    return result
