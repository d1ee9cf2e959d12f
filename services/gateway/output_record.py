"""What is known of one prompt's output: the token ids of each choice so far, and which choices have ended. Pure.

Another attempt is begun with it. What is in the record has been given to the client or certainly will be, so it only
grows, by at most max_tokens for a choice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from kvmesh.v1.worker_pb2 import KnownOutput, WorkerChoiceFinish, WorkerGenerateResponse


class OutputDiverged(Exception):
    """Two attempts at one output do not draw the same."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a record had come: tokens of each choice, and whether nothing was left to be drawn of it."""

    lengths: tuple[int, ...]
    spent: tuple[bool, ...]


class OutputRecord:
    """Owner of the token ids. Choices are numbered as the worker numbers them."""

    __slots__ = ("_ended", "_max_tokens", "_stop_token_ids", "_tokens", "num_tokens")

    def __init__(self, num_choices: int, max_tokens: int, stop_token_ids: Sequence[int]) -> None:
        self._tokens = [array("I") for _ in range(num_choices)]
        self._ended = [False] * num_choices
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self.num_tokens = 0

    def note(self, message: WorkerGenerateResponse) -> bool:
        """Take in tokens or a finish; False for what comes of a choice that has ended already, and is to be dropped."""
        if message.HasField("finish"):
            choice = message.finish.choice
            is_news = not self._ended[choice]
            self._ended[choice] = True
            return is_news
        choice, token_ids = message.tokens.choice, message.tokens.token_ids
        if self._ended[choice]:
            return False
        self._tokens[choice].extend(token_ids)
        self.num_tokens += len(token_ids)
        return True

    def news(self, message: WorkerGenerateResponse, after: int = 0) -> WorkerGenerateResponse | None:
        """What a message of an attempt beside another has beyond the record; None: nothing. It is not noted.

        Tokens of a choice that has ended are none, whatever they are: their worker may not have been told of the end.
        after: tokens of the choice up to the last that has come of the attempt, noted or not. Raises OutputDiverged
        when it has other tokens in the places of known ones, or leaves some out.
        """
        if not message.HasField("tokens"):
            return message
        if self._ended[message.tokens.choice]:
            return None
        token_ids, known = message.tokens.token_ids, self._tokens[message.tokens.choice]
        first = message.tokens.position
        num_known = max(0, min(len(known) - first, len(token_ids)))
        if first > max(len(known), after) or list(known[first : first + num_known]) != list(token_ids[:num_known]):
            raise OutputDiverged
        if num_known == len(token_ids):
            return None
        if not num_known:
            return message
        rest = WorkerGenerateResponse()
        rest.CopyFrom(message)
        rest.tokens.position += num_known
        del rest.tokens.token_ids[:num_known]
        del rest.tokens.logprobs[:num_known]
        return rest

    def is_reached(self, lengths: Mapping[int, int]) -> bool:
        """Whether an attempt that has come so far of each choice has nothing to catch up with."""
        spent = self._spent()
        return all(spent[choice] or lengths.get(choice, 0) >= len(one) for choice, one in enumerate(self._tokens))

    def end(self, choice: int) -> None:
        """Nothing more is wanted of a choice. Idempotent."""
        self._ended[choice] = True

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(self._ended)

    @property
    def num_open(self) -> int:
        """Choices that something is left to be drawn of; one that lacks only its finish is none of them."""
        return self._spent().count(False)

    def first_open(self) -> Sequence[int]:
        """Tokens of the first of these, of the first choice when there is none."""
        return self._tokens[self._spent().index(False) if self.num_open else 0]

    def further_tokens(self) -> int:
        """Tokens of all open choices but that one."""
        is_spent = self._spent()
        return sum([len(tokens) for choice, tokens in enumerate(self._tokens) if not is_spent[choice]][1:])

    def mark(self) -> Mark:
        """How far it has come."""
        return Mark(tuple(map(len, self._tokens)), tuple(self._spent()))

    def known(self, since: Mark | None = None) -> list[KnownOutput]:
        """The record as an attempt is told it, or what is new in it since `since`; choices without any are left out."""
        before = since or Mark((0,) * len(self._tokens), (False,) * len(self._tokens))
        return [
            KnownOutput(choice=choice, token_ids=tokens[before.lengths[choice] :], finished=is_spent)
            for choice, (tokens, is_spent) in enumerate(zip(self._tokens, self._spent(), strict=True))
            if len(tokens) > before.lengths[choice] or is_spent != before.spent[choice]
        ]

    def loose_ends(self) -> list[WorkerGenerateResponse]:
        """End the choices that have had their last token, and give the finishes that a lost attempt did not tell."""
        finishes: list[WorkerGenerateResponse] = []
        for choice, reason in enumerate(map(self._end_of_tokens, range(len(self._tokens)))):
            if reason is not None and not self._ended[choice]:
                self._ended[choice] = True
                finishes.append(WorkerGenerateResponse(finish=WorkerChoiceFinish(choice=choice, reason=reason)))
        return finishes

    def _spent(self) -> list[bool]:
        return [ended or self._end_of_tokens(choice) is not None for choice, ended in enumerate(self._ended)]

    def _end_of_tokens(self, choice: int) -> FinishReason.ValueType | None:
        """Why the last token of a choice ends it; None when it does not."""
        tokens = self._tokens[choice]
        if tokens and tokens[-1] in self._stop_token_ids:
            return FINISH_REASON_STOP
        return FINISH_REASON_LENGTH if len(tokens) >= self._max_tokens else None
