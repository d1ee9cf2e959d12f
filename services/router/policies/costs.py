"""What a request would cost on each candidate, in seconds: the terms of the predicted time to first token.

    predicted TTFT = queue + pull + prefill + interference + correction

Blocks are moved where moving is predicted to be faster than computing (`pulls`). All rates are the workers' own,
learned online.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.common.step_costs import pairs_of
from services.router.policies.correction import features
from services.router.policies.engine_time import interference_s, work_ahead
from services.router.policies.harm import (
    MAX_SHARE,
    answer_s,
    decode_harm_s,
    delay_harm_s,
    eviction_harm_s,
    occupancy_harm_s,
)
from services.router.policies.pulls import PullPlans, best_plans
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, PolicyView


@dataclass(frozen=True, slots=True)
class Costs:
    """One element for each candidate."""

    queue_s: FloatArray
    pull_s: FloatArray
    prefill_s: FloatArray
    interference_s: FloatArray
    # What earlier predictions have been wrong by, and the parts that this was learned of, [candidate, weight].
    correction_s: FloatArray
    features: FloatArray
    # Time that this request takes from others, by kind.
    harm: Mapping[str, FloatArray]
    # Mean time of each token after the first.
    predicted_tpot_s: FloatArray
    uncorrected_tpot_s: FloatArray
    prefill_tokens: IntArray
    # Of each of these the tokens before it, summed.
    prefill_pairs: FloatArray
    # All that the worker has to do for the request.
    work_s: FloatArray
    pull: PullPlans

    @property
    def predicted_ttft_s(self) -> FloatArray:
        """Seconds from the decision to the first token."""
        return self.queue_s + self.pull_s + self.prefill_s + self.interference_s + self.correction_s

    @property
    def harm_s(self) -> FloatArray:
        """Seconds of others, all kinds together."""
        return np.sum(list(self.harm.values()), axis=0)  # type: ignore[no-any-return]

    def terms(self) -> dict[str, FloatArray]:
        """For the explanation; not summed: what of pull_s is waiting at holders, and the prefill that pulls save."""
        return {
            "queue_s": self.queue_s,
            "pull_s": self.pull_s,
            "prefill_s": self.prefill_s,
            "interference_s": self.interference_s,
            "correction_s": self.correction_s,
            "harm_s": self.harm_s,
            **self.harm,
            "predicted_tpot_s": self.predicted_tpot_s,
            "pull_queue_s": self.pull.queue_s,
            "saved_prefill_s": self.pull.alone_s - self.prefill_s,
        }


def estimate(request: PolicyRequest, view: PolicyView) -> Costs:
    """Costs of `request` on every candidate."""
    rows = view.rows
    pull = best_plans(request, view)
    start = pull.end * request.block_tokens
    tokens = request.prompt_tokens - start
    ahead = work_ahead(request, rows)
    queue_s = ahead.seconds + _slot_wait_s(request, view)
    output_s = answer_s(request, view)
    harm = {
        "decode_harm_s": decode_harm_s(request, view),
        "delay_harm_s": delay_harm_s(pull.prefill_s, queue_s, view),
        "occupancy_harm_s": occupancy_harm_s(output_s, view),
        "eviction_harm_s": eviction_harm_s(request, view),
    }
    # What is before the request is computed while it pulls.
    pull_s = np.maximum(0.0, pull.seconds - ahead.seconds)
    beside_s = interference_s(request, ahead, rows, tokens)
    parts = features(queue_s, pull.prefill_s, pull_s + beside_s, tokens)
    corrected_s = rows["pace"] * (parts @ view.correction.weights)
    tpot_s = _tpot_s(request, view, ahead.room)
    return Costs(
        queue_s=queue_s,
        pull_s=pull_s,
        prefill_s=pull.prefill_s,
        interference_s=beside_s,
        correction_s=corrected_s - (queue_s + pull_s + pull.prefill_s + beside_s),
        features=parts,
        harm=harm,
        predicted_tpot_s=tpot_s * rows["pace"] * view.correction.tpot,
        uncorrected_tpot_s=tpot_s,
        prefill_tokens=tokens,
        prefill_pairs=pairs_of(start, tokens),
        work_s=pull.prefill_s + output_s,
        pull=pull,
    )


def _tpot_s(request: PolicyRequest, view: PolicyView, room: FloatArray) -> FloatArray:
    """A decode step with this request in it, prolonged by the prompts that come meanwhile.

    They take their share of the time, and of no step more than fills it.
    """
    rows = view.rows
    others = rows["decoding"] + rows["waiting"] + rows["pending"]
    step_s = rows["fixed_s"] + rows["decoding_s"] + rows["decode_slope_s"] * (others + request.num_choices)
    share = np.minimum(view.pressure.prefill_share, MAX_SHARE)
    result: FloatArray = step_s + np.minimum(step_s * share / (1.0 - share), room * rows["prefill_token_s"])
    return result


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
