"""From a worker's tokens to what the client sees of one choice: text, stop strings, counts. Pure.

Invariants: the text of all deltas is the decoded output up to the stop string or stop token; a choice finishes once;
tokens after its finish are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.v1.common_pb2 import PositionLogprobs

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopMatcher, StopStrings
from services.gateway.text.vocabulary import Vocabulary

STOP, LENGTH = "stop", "length"


@dataclass(slots=True)
class Accepted:
    """A worker has admitted a prompt."""

    worker_id: str
    cached_tokens: int


@dataclass(slots=True)
class Delta:
    """New output of a choice; text may lag behind token_ids. has_stop_token: the last id ended the choice."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] = ()
    has_stop_token: bool = False


@dataclass(slots=True)
class Finish:
    """A choice has ended."""

    index: int
    reason: str
    stop_string: str = ""


@dataclass(slots=True)
class PromptScores:
    """Log probabilities of the next tokens of a prompt; of its first token there is none."""

    prompt: int
    first: int
    positions: Sequence[PositionLogprobs]


@dataclass(slots=True)
class Embedded:
    """The embedding of a prompt: little-endian float32, of length one."""

    prompt: int
    values: bytes


Event = Accepted | PromptScores | Embedded | Delta | Finish


class ChoiceOutput:
    """State of one choice."""

    __slots__ = ("_detokenizer", "_index", "_matcher", "_stop_tokens", "finished", "num_tokens")

    def __init__(
        self, index: int, vocabulary: Vocabulary, stops: StopStrings | None, stop_tokens: frozenset[int]
    ) -> None:
        """index: as the client sees it."""
        self._index = index
        self._detokenizer = Detokenizer(vocabulary)
        self._matcher = StopMatcher(stops) if stops is not None else None
        self._stop_tokens = stop_tokens
        self.finished = False
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> list[Event]:
        """Events of new tokens, none once the choice has finished."""
        if self.finished or not token_ids:
            return []
        ends = token_ids[-1] in self._stop_tokens
        if self._matcher is not None:
            return self._push_matching(token_ids, logprobs, ends, self._matcher)
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids[:-1] if ends else token_ids)
        return [Delta(self._index, text, token_ids, logprobs, ends)]

    def end(self, reason: str) -> list[Event]:
        """Events of the worker's finish: text held back, then the end."""
        if self.finished:
            return []
        self.finished = True
        text, stop = self._detokenizer.finish(), None
        if self._matcher is not None:
            text, stop = self._matcher.push(text)
            if stop is None:
                text += self._matcher.flush()
        events: list[Event] = [Delta(self._index, text, ())] if text else []
        return [*events, Finish(self._index, STOP if stop else reason, stop or "")]

    def _push_matching(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], ends: bool, matcher: StopMatcher
    ) -> list[Event]:
        shown: list[str] = []
        for i, token_id in enumerate(token_ids):
            is_stop_token = ends and i == len(token_ids) - 1
            text, stop = matcher.push("" if is_stop_token else self._detokenizer.push((token_id,)))
            shown.append(text)
            if stop is not None:
                self.finished = True
                self.num_tokens += i + 1
                delta = Delta(self._index, "".join(shown), token_ids[: i + 1], logprobs[: i + 1])
                return [delta, Finish(self._index, STOP, stop)]
        self.num_tokens += len(token_ids)
        return [Delta(self._index, "".join(shown), token_ids, logprobs, ends)]
