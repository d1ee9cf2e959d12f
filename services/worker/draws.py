"""What is drawn and how, as plain data between the scheduler's side and the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.worker.messages import PositionLogprob, Sampling


@dataclass(frozen=True, slots=True)
class DrawRow:
    """What row i of the logits is drawn with. position: index of the drawn token in its sequence.

    allowed: bool [vocab_size], the tokens that a grammar allows; None: all. drafted: the token that the next row takes
    to be drawn here, so that it means nothing where another one is; None: the next row is of another chunk.
    """

    sampling: Sampling
    choice: int
    position: int
    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    allowed: npt.NDArray[np.bool_] | None = None
    drafted: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Of the logits in a row, the log probability of `token` and of the `num_top` most likely ones is wanted."""

    token: int
    num_top: int


@dataclass(frozen=True, slots=True)
class HiddenRow:
    """Of a row, the hidden state is wanted from which its logits were made."""


ReadRow = ScoreRow | HiddenRow
Hidden = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """One token of each row, None where its logits are not numbers; logprobs None where none are wanted.

    Of rows that mean nothing, any token. reads: what each ReadRow wants, None where it is not numbers.
    """

    tokens: list[int | None]
    logprobs: list[PositionLogprob | None]
    reads: list[PositionLogprob | Hidden | None] = field(default_factory=list)
