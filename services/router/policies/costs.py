"""What a request would cost on each candidate, in seconds: the terms of the predicted time to first token.

    predicted TTFT = queue + pull + prefill + interference + adapter + correction

Blocks are moved where moving is predicted to be faster than computing (`pulls`). All rates are the workers' own,
learned online.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.common.step_costs import pairs_of
from services.router.policies.correction import corrected_s, features
from services.router.policies.engine_time import Decodes, decodes, interference_s, work_ahead
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

EVERYONE = slice(None)


@dataclass(slots=True)
class Costs:
    """One element for each candidate."""

    queue_s: FloatArray
    pull_s: FloatArray
    prefill_s: FloatArray
    interference_s: FloatArray
    # Of loading the request's adapter.
    adapter_s: FloatArray
    # Seconds from the decision to the first token: all of these, corrected by what predictions have been wrong by.
    predicted_ttft_s: FloatArray
    # Time that this request takes from others, by kind, and all kinds together.
    harm: Mapping[str, FloatArray]
    harm_s: FloatArray
    # Mean time of each token after the first.
    predicted_tpot_s: FloatArray
    uncorrected_tpot_s: FloatArray
    # Of the prompt: those that are there by then, and those that follow.
    held_tokens: IntArray
    prefill_tokens: IntArray
    # All that the worker has to do for the request.
    work_s: FloatArray
    pull: PullPlans

    def terms(self, at: slice | IntArray = EVERYONE) -> dict[str, FloatArray]:
        """For the explanation of some candidates; not summed: what of pull_s is waiting at holders, and the prefill
        that pulls save.
        """
        queue_s, pull_s, prefill_s, beside_s, adapter_s = (
            values[at] for values in (self.queue_s, self.pull_s, self.prefill_s, self.interference_s, self.adapter_s)
        )
        return {
            "queue_s": queue_s,
            "pull_s": pull_s,
            "prefill_s": prefill_s,
            "interference_s": beside_s,
            "adapter_s": adapter_s,
            "correction_s": self.predicted_ttft_s[at] - (queue_s + pull_s + prefill_s + beside_s + adapter_s),
            "harm_s": self.harm_s[at],
            **{name: values[at] for name, values in self.harm.items()},
            "predicted_tpot_s": self.predicted_tpot_s[at],
            "pull_queue_s": self.pull.queue_s(at),
            "saved_prefill_s": self.pull.alone_s[at] - prefill_s,
        }

    def uncorrected_ttft_s(self, at: int) -> float:
        """Of one candidate."""
        own_s = self.queue_s[at] + self.pull_s[at] + self.prefill_s[at]
        return float(own_s + self.interference_s[at] + self.adapter_s[at])

    @property
    def prefill_pairs(self) -> FloatArray:
        """Of each of the prefill tokens those before it, summed."""
        return pairs_of(self.held_tokens, self.prefill_tokens)

    def features(self, at: int) -> tuple[float, ...]:
        """Of one candidate: what the correction was learned of."""
        others_s = float(self.pull_s[at] + self.interference_s[at])
        return features(float(self.queue_s[at]), float(self.prefill_s[at]), others_s, int(self.prefill_tokens[at]))


def estimate(request: PolicyRequest, view: PolicyView) -> Costs:
    """Costs of `request` on every candidate."""
    rows = view.rows
    pull = best_plans(request, view)
    held_tokens = pull.end * request.block_tokens
    tokens = request.prompt_tokens - held_tokens
    ahead, beside = work_ahead(request, rows), decodes(request, rows)
    needed_blocks = math.ceil(request.prompt_tokens / request.block_tokens) - view.local_blocks
    queue_s = _with_slot_wait(ahead.seconds, request, view, needed_blocks)
    output_s = answer_s(request, beside)
    harm = {
        "decode_harm_s": decode_harm_s(request, rows, beside),
        "delay_harm_s": delay_harm_s(pull.prefill_s, queue_s, view),
        "occupancy_harm_s": occupancy_harm_s(output_s, view),
        "eviction_harm_s": eviction_harm_s(request, view, needed_blocks),
    }
    by_decode, by_delay, by_occupancy, by_eviction = harm.values()
    # What is before the request is computed while it pulls.
    pull_s = np.maximum(0.0, pull.seconds - ahead.seconds) if len(view.sources.end) else pull.seconds
    beside_s = interference_s(ahead, rows, tokens)
    expected_s = corrected_s(view.correction, queue_s, pull.prefill_s, pull_s + beside_s, tokens)
    tpot_s = _tpot_s(beside, view, ahead.room)
    adapter_s = _adapter_s(request, view)
    return Costs(
        queue_s=queue_s,
        pull_s=pull_s,
        prefill_s=pull.prefill_s,
        interference_s=beside_s,
        adapter_s=adapter_s,
        predicted_ttft_s=rows["pace"] * expected_s + adapter_s,
        harm=harm,
        harm_s=by_decode + by_delay + by_occupancy + by_eviction,
        predicted_tpot_s=tpot_s * rows["pace"] * view.correction.tpot,
        uncorrected_tpot_s=tpot_s,
        held_tokens=held_tokens,
        prefill_tokens=tokens,
        work_s=pull.prefill_s + output_s,
        pull=pull,
    )


def _adapter_s(request: PolicyRequest, view: PolicyView) -> FloatArray:
    """Until the request's adapter is there: loading it, and an answer's time where no place is free for it."""
    if view.adapters is None:
        return np.zeros(len(view.rows), np.float64)
    service_s = request.expected_output_tokens * view.rows["decode_step_s"]
    result: FloatArray = view.adapters.load_s + np.where(view.adapters.is_full, service_s, 0.0)
    return result


def _tpot_s(beside: Decodes, view: PolicyView, room: FloatArray) -> FloatArray:
    """A decode step with this request in it, prolonged by the prompts that come meanwhile.

    They take their share of the time, and of no step more than fills it.
    """
    step_s = beside.step_s
    share = np.minimum(view.pressure.prefill_share, MAX_SHARE)
    filled_s = room * view.rows["prefill_token_s"]
    result: FloatArray = step_s + np.minimum(step_s * share / (1.0 - share), filled_s)
    return result


def _with_slot_wait(
    ahead_s: FloatArray, request: PolicyRequest, view: PolicyView, needed_blocks: IntArray
) -> FloatArray:
    """And until there is a place in the batch, and blocks: each running sequence holds its own for an output's time."""
    rows = view.rows
    above = rows["running"] + rows["waiting"] + rows["pending"] + request.num_choices - rows["max_running"]
    lacking = needed_blocks + rows["pending_blocks"] - rows["free_blocks"]
    if above[above.argmax()] <= 0 and lacking[lacking.argmax()] <= 0:
        return ahead_s
    service_s = request.expected_output_tokens * rows["decode_step_s"]
    for_slot_s = np.maximum(0.0, above) / rows["max_running"] * service_s
    for_blocks_s = np.where(lacking > 0, service_s / np.maximum(1.0, rows["running"]), 0.0)
    result: FloatArray = ahead_s + np.maximum(for_slot_s, for_blocks_s)
    return result
