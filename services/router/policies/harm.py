"""What a request takes from others, in seconds of theirs: its worker's present requests, and those still to come."""

from __future__ import annotations

import numpy as np

from services.router.policies.engine_time import Decodes
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, PolicyView, WorkerRows

# A mesh that is given more work than it can do has no finite queue: what is counted stays finite.
MAX_SHARE = 0.95


def decode_harm_s(request: PolicyRequest, rows: WorkerRows, beside: Decodes) -> FloatArray:
    """Each step of this request's output makes everybody's longer by the slope of the step time."""
    result: FloatArray = request.expected_output_tokens * request.num_choices * rows["decode_slope_s"] * beside.others
    return result


def answer_s(request: PolicyRequest, beside: Decodes) -> FloatArray:
    """Time of the worker that the request's output takes: a step is shared by all that decode in it."""
    result: FloatArray = request.expected_output_tokens * request.num_choices * beside.step_s / beside.together
    return result


def occupancy_harm_s(answer_s: FloatArray, view: PolicyView) -> FloatArray:
    """Time that others cannot have, which counts as far as workers are scarce.

    A lone decode makes every chunk of a long prompt longer, and with one on each worker no worker is left that would
    compute such a prompt in time: where work abounds, outputs that share steps leave more workers to prompts.
    """
    return answer_s * min(view.pressure.utilisation, 1.0)


def delay_harm_s(work_s: FloatArray, queue_s: FloatArray, view: PolicyView) -> FloatArray:
    """Requests that arrive before the worker is idle again wait for this one's work.

    With arrivals at a rate and a utilisation, a queue that takes queue_s + work_s to compute lasts
    (queue_s + work_s) / (1 - utilisation), and each arrival in that time is delayed by work_s (an M/G/1 busy period;
    Kleinrock, "Queueing Systems", 1975, section 5.8).
    """
    pressure = view.pressure
    arrivals = pressure.arrivals_per_s / (1.0 - min(pressure.utilisation, MAX_SHARE))
    result: FloatArray = work_s * (queue_s + work_s) * arrivals
    return result


def eviction_harm_s(request: PolicyRequest, view: PolicyView, needed_blocks: IntArray) -> FloatArray:
    """Computing again what this request evicts, as often as what is held is asked for."""
    rows = view.rows
    unused = np.maximum(0.0, rows["free_blocks"] - rows["cached_blocks"] - rows["pending_blocks"])
    evicted = np.minimum(np.maximum(0.0, needed_blocks - unused), rows["cached_blocks"])
    result: FloatArray = evicted * rows["prefill_token_s"] * (request.block_tokens * view.pressure.reuse)
    return result
