"""Log probabilities of prompts: vLLM's `prompt_logprobs`, and those before an echoed completion's own. Pure."""

from __future__ import annotations

from typing import Any

from kvmesh.v1.common_pb2 import PositionLogprobs
from kvmesh.v1.worker_pb2 import WorkerGenerateRequest

from services.gateway.api.openai_logprobs import FLOOR, completion_logprobs
from services.gateway.output import PromptScores
from services.gateway.request import Plan
from services.gateway.text.vocabulary import Vocabulary


class PromptLogprobs:
    """Those of one request's prompts, gathered as they come."""

    def __init__(self, plan: Plan, vocabulary: Vocabulary) -> None:
        self._plan = plan
        self._vocabulary = vocabulary
        self._positions: list[list[PositionLogprobs]] = [[] for _ in plan.prompts]

    def push(self, scores: PromptScores) -> None:
        """Take in the next of a prompt."""
        self._positions[scores.prompt] += scores.positions

    def by_token(self, choice: int, num_top: int) -> list[dict[str, Any] | None]:
        """For each prompt token those of itself and of the `num_top` likeliest, by token id; None for the first."""
        positions = self._positions[choice // self._plan.num_choices]
        return [None, *(self._position(position, num_top) for position in positions)]

    def before_echo(self, choice: int, num_top: int) -> tuple[dict[str, list[Any]], int]:
        """The four parallel arrays of an echoed prompt, and the text offset (characters) after it."""
        prompt = choice // self._plan.num_choices
        first = WorkerGenerateRequest.FromString(self._plan.prompts[prompt].message).prompt_token_ids[0]
        arrays, offset = completion_logprobs([_only(first)], self._vocabulary, 0)
        # Nothing is before the first token that it could follow.
        arrays["token_logprobs"], arrays["top_logprobs"] = [None], [None]
        cut = [_cut(position, num_top) for position in self._positions[prompt]]
        rest, offset = completion_logprobs(cut, self._vocabulary, offset)
        return {name: values + rest[name] for name, values in arrays.items()}, offset

    def _position(self, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
        found = {
            str(top.token_id): self._entry(top.token_id, top.logprob, rank)
            for rank, top in enumerate(position.top[:num_top], 1)
        }
        chosen = position.chosen
        return {**found, str(chosen.token_id): self._entry(chosen.token_id, chosen.logprob, position.rank)}

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(FLOOR, logprob), "rank": rank, "decoded_token": self._vocabulary.text_of(token_id)}


def _cut(position: PositionLogprobs, num_top: int) -> PositionLogprobs:
    return PositionLogprobs(chosen=position.chosen, top=position.top[:num_top], rank=position.rank)


def _only(token_id: int) -> PositionLogprobs:
    position = PositionLogprobs()
    position.chosen.token_id = token_id
    return position
