"""What is drawn and how, as plain data between the scheduler's side and the sampler."""

from __future__ import annotations

from dataclasses import dataclass

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
class Draws:
    """One token of each row, None where its logits are not numbers; logprobs None where none are wanted.

    Of rows that mean nothing, any token.
    """

    tokens: list[int | None]
    logprobs: list[PositionLogprob | None]
