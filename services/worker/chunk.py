"""What passes between scheduler and step: the chunks that a step computes, and what it did to each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.sequence import Sequence

# Prompt tokens read in one step: a row of logits each.
MOST_ROWS_READ = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute tokens start..start + length of a sequence, and draw the next one if `draws`.

    drafted: how many of them, the last ones, are guesses that lie behind the sequence's known tokens. After the last
    known token and after each guess a token is drawn; a guess holds if it is what was drawn in its place.
    read: how many prompt tokens, from the request's rows_read on, whose results are wanted for themselves: the logits
    after them, for log probabilities of the prompt, or their hidden states.
    """

    sequence: Sequence
    start: int
    length: int
    draws: bool
    drafted: int = 0
    read: int = 0

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn, those after wrong guesses included; the logits of as many last tokens are wanted."""
        return 1 + self.drafted if self.draws else 0

    @property
    def read_rows(self) -> range:
        """Which of its tokens are read; valid until it is committed."""
        first = self.sequence.request.rows_read - self.start
        return range(first, first + self.read)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step did to a sequence: the tokens drawn that hold, why it ends ("" goes on, "stop", "length"), the last
    block made reusable.
    """

    sequence: Sequence
    tokens: list[int]
    finish: str
    completed_slot: int | None


def prompt_chunk(sequence: Sequence, most: int, most_read: int) -> Chunk:
    """The next of a sequence's known tokens, at most `most`, of which not more than `most_read` are to be read."""
    request, start = sequence.request, sequence.num_computed
    length, read = min(sequence.num_due, most), 0
    if request.wants_rows and sequence is request.leader:
        length = min(length, request.rows_read + most_read - start)
        read = max(0, min(start + length, request.rows_to_read) - request.rows_read)
    return Chunk(sequence, start, length, draws=length == sequence.num_missing and not request.embeds, read=read)
