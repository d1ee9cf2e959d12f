"""What passes between scheduler and step: the chunks that a step computes, and what it did to each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute tokens start..start + length of a sequence, and draw the next one if `draws`.

    drafted: how many of them, the last ones, are guesses that lie behind the sequence's known tokens. After the last
    known token and after each guess a token is drawn; a guess holds if it is what was drawn in its place.
    """

    sequence: Sequence
    start: int
    length: int
    draws: bool
    drafted: int = 0

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn, those after wrong guesses included; the logits of as many last tokens are wanted."""
        return 1 + self.drafted if self.draws else 0


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did to a sequence: the tokens drawn that hold, why it ends ("" goes on, "stop", "length"), the last
    block made reusable.
    """

    sequence: Sequence
    tokens: list[int]
    finish: str
    completed_slot: int | None
