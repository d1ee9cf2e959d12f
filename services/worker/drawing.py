"""From the chunks of a step to how their tokens are drawn, and from a drawn token to what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.draws import DrawRow
from services.worker.messages import ChoiceOutput, PositionLogprob
from services.worker.scheduler import Advance, Chunk


def draw_rows(chunks: Sequence[Chunk]) -> list[DrawRow]:
    """How to draw the tokens of a step, one row for each chunk that draws.

    Grammars are followed here: call it while the device computes the step.
    """
    return [
        DrawRow(
            sampling=s.request.sampling,
            choice=s.choice,
            position=s.num_tokens,
            prompt=s.request.prompt,
            output=s.output,
            allowed=None if s.follower is None else s.follower.allowed(s.output),
        )
        for s in (chunk.sequence for chunk in chunks if chunk.draws)
    ]


def output_of(advance: Advance, token: int, logprob: PositionLogprob | None) -> ChoiceOutput:
    """What is said of the token that a sequence has drawn."""
    sequence = advance.sequence
    logprobs = [] if logprob is None else [logprob]
    return ChoiceOutput(sequence.request.key, sequence.choice, [token], logprobs, advance.finish)
