"""The latest decisions by request, for whoever asks why. Synchronous; time comes in as an argument.

Bounded: the oldest request goes when a new one comes. Of each grant the best few candidates are kept, as names and one
small array of their terms, so that a decision among a thousand workers costs what one among eight does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.router.domain import Ask, AttemptId, Explanation, Placement, Refused, WorkerId

KEPT_CANDIDATES = 8
# A request is asked for anew while all workers are full; its first and its latest answers are kept.
MAX_ATTEMPTS = 16
_MAX_PROMPTS = 128


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best candidates, best first; `values` has a row for each and a column for the score, then each term."""

    total: int
    workers: tuple[str, ...]
    terms: tuple[str, ...]
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, explanation: Explanation, names: Mapping[int, WorkerId]) -> Candidates:
        """The chosen one first, though others may have the same score. names: worker ids by row."""
        scores = explanation.scores
        kept = min(KEPT_CANDIDATES, len(scores))
        order = np.argpartition(scores, kept - 1)[:kept] if kept < len(scores) else np.arange(len(scores))
        order = order[np.argsort(scores[order], kind="stable")]
        order = np.array([explanation.chosen, *(at for at in order.tolist() if at != explanation.chosen)][:kept])
        terms = explanation.terms_of(order)
        return cls(
            total=len(scores),
            workers=tuple(names.get(row, "") for row in explanation.candidates[order].tolist()),
            terms=tuple(terms),
            values=np.array([scores[order], *terms.values()], np.float32).T,
        )

    def rows(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Worker, score and terms of each."""
        for worker, (score, *terms) in zip(self.workers, self.values.tolist(), strict=True):
            yield worker, score, dict(zip(self.terms, terms, strict=True))


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as its gateway tells; 0 where there was no such time."""

    outcome: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    output_tokens: int = 0


@dataclass(slots=True)
class Decision:
    """One answer to one ask. No ids of blocks: who has one could ask for what is in it."""

    id: AttemptId
    decided_s: float
    model: str
    model_digest: bytes
    prompt_tokens: int
    prompt_blocks: int
    refused: Refused | None = None
    worker_id: str = ""
    policy: str = ""
    local_blocks: int = 0
    pulled_blocks: int = 0
    # Who takes over once `worker_id` has computed the prompt; "" where one worker does all.
    handoff_worker_id: str = ""
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    candidates: Candidates | None = None
    ended: Ended | None = None


@dataclass(slots=True)
class Explanations:
    """capacity: most requests; 0 keeps none."""

    capacity: int
    _requests: OrderedDict[str, list[Decision]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._requests)

    def decided(self, ask: Ask, answer: Placement | Refused, names: Mapping[int, WorkerId], now_s: float) -> None:
        """An ask has been answered. names: worker ids by row, as the answer was made."""
        if not self.capacity:
            return
        decisions = self._requests.setdefault(ask.id.request_id, [])
        decisions.append(_decision(ask, answer, names, now_s))
        if len(decisions) > MAX_ATTEMPTS:
            del decisions[1]
        if len(self._requests) > self.capacity:
            self._requests.popitem(last=False)

    def ended(self, attempt: AttemptId, ended: Ended) -> None:
        """A gateway has closed an attempt; unknown ones are ignored."""
        for decision in reversed(self._requests.get(attempt.request_id, ())):
            if attempt == decision.id or (decision.handoff_worker_id and attempt == decision.id.handoff):
                decision.ended = ended if decision.ended is None else _joined(decision.ended, ended)
                return

    def of(self, request_id: str) -> list[Decision]:
        """What is known of a request; those of each of its prompts (ID-0, ID-1, …) where it had several."""
        found = list(self._requests.get(request_id, ()))
        for number in range(_MAX_PROMPTS):
            prompt = self._requests.get(f"{request_id}-{number}")
            if prompt is not None:
                found += prompt
        return found


def _joined(one: Ended, other: Ended) -> Ended:
    """Of both parts of a request that was handed over; whatever went wrong is said."""
    outcome = one.outcome if other.outcome == "ok" else other.outcome
    ttft_s, tpot_s = max(one.ttft_s, other.ttft_s), max(one.tpot_s, other.tpot_s)
    return Ended(outcome, ttft_s, tpot_s, one.output_tokens + other.output_tokens)


def _decision(ask: Ask, answer: Placement | Refused, names: Mapping[int, WorkerId], now_s: float) -> Decision:
    asked = (ask.id, now_s, ask.model, ask.model_digest, ask.prompt_tokens, len(ask.block_ids))
    if isinstance(answer, Refused):
        return Decision(*asked, refused=answer)
    return Decision(
        *asked,
        worker_id=answer.worker_id,
        policy=answer.policy,
        local_blocks=answer.local_blocks,
        pulled_blocks=sum(run.num_blocks for run in answer.pull_plan),
        handoff_worker_id=answer.handoff.worker_id if answer.handoff else "",
        predicted_ttft_s=answer.predicted_ttft_s,
        predicted_tpot_s=(answer.handoff or answer).predicted_tpot_s,
        candidates=Candidates.of(answer.explanation, names),
    )
