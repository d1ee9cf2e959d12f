"""What a step of an engine takes, as a worker learns it and routers use it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_IntArray = npt.NDArray[np.int64]
_FloatArray = npt.NDArray[np.float64]

# Share of a step of one sequence that each further one adds, before it has been measured.
_SEQUENCE_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    prefill_pairs: for each prompt token the tokens before it that it attends to, summed. context_tokens: of all
    decoding sequences together.
    """

    prefill_tokens: int
    prefill_pairs: float
    decode_sequences: int
    context_tokens: int


@overload
def pairs_of(start: float, length: float) -> float: ...


@overload
def pairs_of(start: _IntArray, length: _IntArray) -> _FloatArray: ...


def pairs_of(start: float | _IntArray, length: float | _IntArray) -> float | npt.NDArray[Any]:
    """Pairs of a prompt's chunk of `length` tokens that begins after `start` tokens; of each of many chunks."""
    return length * (start + length / 2)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds, all of them added up; none is below zero.

    fixed_s: of every step; decoding_s: more where at least one sequence decodes; the others for each prompt token, each
    of its pairs, each decoding sequence and each token of context.
    """

    fixed_s: float
    decoding_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_sequence_s: float
    context_token_s: float

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        return sum(value * part for value, part in zip(self.values(), features(work), strict=True))

    def values(self) -> tuple[float, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


def features(work: StepWork) -> tuple[float, ...]:
    """What each of the costs is multiplied with, in the order of the fields of StepCosts."""
    return (
        1.0,
        float(work.decode_sequences > 0),
        float(work.prefill_tokens),
        work.prefill_pairs,
        float(work.decode_sequences),
        float(work.context_tokens),
    )


def assumed_costs(prefill_tokens_per_s: float, decode_step_s: float) -> StepCosts:
    """From a self-benchmark's two figures, until steps have been measured."""
    return StepCosts(
        fixed_s=0.0,
        decoding_s=(1.0 - _SEQUENCE_SHARE) * decode_step_s,
        prefill_token_s=1.0 / prefill_tokens_per_s,
        prefill_pair_s=0.0,
        decode_sequence_s=_SEQUENCE_SHARE * decode_step_s,
        context_token_s=0.0,
    )
