"""When an engine gets to a further prompt: its steps, in the order in which its scheduler takes the work.

Each step computes one token of every decoding sequence first and fills its budget of tokens with prompts: those that
have begun, then those that wait, by class and arrival. So a prompt is done after

    ceil((tokens ahead + its own) / room for prompts in a step) steps,

each of which takes what a step takes with the present decodes, beside the prompts' own time. What was ahead at the
last report shrinks with the time since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.common.fair_queue import class_index
from services.common.step_costs import pairs_of
from services.router.policies.view import FloatArray, IntArray, PolicyRequest, WorkerRows

# Prompt tokens that a step takes in however much is decoding; the worker's scheduler has the same number.
_MIN_PREFILL_TOKENS = 32.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work before the request on each candidate: tokens, and seconds until it has been computed.

    room: for prompt tokens in a step. step_s: of every step beside its prompts' own time.
    """

    tokens: FloatArray
    seconds: FloatArray
    room: FloatArray
    step_s: FloatArray


def work_ahead(request: PolicyRequest, rows: WorkerRows) -> Ahead:
    """See Ahead."""
    reported, share = _reported_tokens(request, rows)
    pending = rows["pending_tokens"] - _later(request, rows["pending_by_class"])
    pairs = rows["queued_pairs"] * share + rows["pending_pairs"]
    step_s, room = _steps(rows)
    tokens = reported + pending
    computing_s = tokens * rows["prefill_token_s"] + pairs * rows["prefill_pair_s"] + tokens / room * step_s
    # A step in flight is over after half its time, if nothing more is known of it.
    in_flight_s = np.where(rows["decoding"] > 0, step_s / 2, 0.0)
    elapsed_s = np.clip(request.now_s - rows["told_s"], 0.0, computing_s * reported / np.maximum(1.0, tokens))
    return Ahead(tokens, np.maximum(computing_s - elapsed_s, in_flight_s), room, step_s)


def prefill_s(request: PolicyRequest, rows: WorkerRows, held: IntArray) -> FloatArray:
    """Computing what follows `held` blocks ([candidate or 1, any]) of the prompt when nothing else is there."""
    start = held * request.block_tokens
    tokens = request.prompt_tokens - start
    pairs = pairs_of(start, tokens)
    steps = np.ceil(tokens / rows["step_tokens"][:, None])
    seconds = (
        tokens * rows["prefill_token_s"][:, None]
        + pairs * rows["prefill_pair_s"][:, None]
        + steps * rows["fixed_s"][:, None]
    )
    result: FloatArray = np.maximum(seconds, rows["least_step_s"][:, None])
    return result


def interference_s(request: PolicyRequest, ahead: Ahead, rows: WorkerRows, tokens: IntArray) -> FloatArray:
    """What decoding sequences add to the steps in which the request's own `tokens` are computed."""
    steps = np.ceil((ahead.tokens + tokens) / ahead.room) - ahead.tokens / ahead.room
    alone = np.ceil(tokens / rows["step_tokens"])
    result: FloatArray = np.maximum(0.0, steps * ahead.step_s - alone * rows["fixed_s"])
    return result


def _steps(rows: WorkerRows) -> tuple[FloatArray, FloatArray]:
    decoding = rows["decoding"]
    # One after the other those that are ahead will be decoding: half of all but the last, on average.
    ahead = np.maximum(0.0, rows["running"] + rows["waiting"] - decoding) + rows["pending"]
    by_then = decoding + np.maximum(0.0, ahead - 1.0) / 2
    decode_s = (
        np.minimum(1.0, by_then) * rows["decoding_s"]
        + by_then * rows["decode_sequence_s"]
        + rows["context_tokens"] * rows["context_token_s"]
    )
    budget = rows["step_tokens"]
    room = np.maximum(budget - decoding, np.minimum(budget, _MIN_PREFILL_TOKENS))
    return rows["fixed_s"] + decode_s, room


def _reported_tokens(request: PolicyRequest, rows: WorkerRows) -> tuple[FloatArray, FloatArray]:
    """Reported tokens that are computed first, and their share of all reported ones."""
    first = rows["queued_tokens"] - _later(request, rows["waiting_by_class"])
    return first, first / np.maximum(1.0, rows["queued_tokens"])


def _later(request: PolicyRequest, by_class: FloatArray) -> FloatArray:
    """Tokens of classes that the request overtakes."""
    result: FloatArray = by_class[:, class_index(request.priority) + 1 :].sum(axis=1)
    return result
