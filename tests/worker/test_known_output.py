"""Attempts that begin with output which another has drawn, on the toy model: what is refused, told and cached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.blocks import chain_block_ids
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.messages import (
    AdmittedRequest,
    HolderRun,
    Message,
    RequestFailed,
    RequestUsage,
    Sampling,
    StepOutput,
)
from services.worker.mover_messages import PullBlocks, PullDone
from services.worker.sampler import draw_tokens
from tests.worker.cores import KEY, ROOT, known_output, make_core, submit
from tests.worker.toy import ToyRunner, expected_tokens, prefix_entries

PROMPT = list(range(21))
NUM_BLOCKS = 64


@dataclass
class Toy:
    """A core over the toy model, and what it has said."""

    core: EngineCore = field(default_factory=lambda: make_core(NUM_BLOCKS, max_queue_s=100.0))
    runner: ToyRunner = field(default_factory=lambda: ToyRunner(NUM_BLOCKS))
    said: list[Message] = field(default_factory=list)
    now: float = 0.0

    def tell(self, message: Message) -> None:
        self.core.handle(message, self.now)
        self._listen()

    def run(self, steps: int = 1000) -> None:
        """Run so many steps, or as many as there are."""
        builder = StepBuilder()
        for _ in range(steps):
            chunks = self.core.schedule(self.now)
            self._listen()
            if not chunks:
                return
            self.now += 0.01
            self.runner.submit(builder.build(chunks))
            draws = draw_tokens(self.runner.collect(), EngineCore.draw_rows(chunks))
            self.core.commit(chunks, draws, 0.01, self.now)
            self._listen()

    def tokens(self, key: int, choice: int = 0) -> list[int]:
        """What was drawn for a choice."""
        outputs = [o for m in self.said if isinstance(m, StepOutput) for o in m.choices]
        return [t for o in outputs if (o.key, o.choice) == (key, choice) for t in o.token_ids]

    def usage(self, key: int) -> RequestUsage:
        """The terminal message of a request that ran to its end."""
        (usage,) = [u for m in self.said if isinstance(m, StepOutput) for u in m.completed if u.key == key]
        return usage

    def cached(self, key: int) -> int:
        """What its admission said."""
        (admitted,) = [m for m in self.said if isinstance(m, AdmittedRequest) and m.key == key]
        return admitted.cached_tokens

    def code(self, key: int) -> str:
        """Why a request failed."""
        (failed,) = [m for m in self.said if isinstance(m, RequestFailed) and m.key == key]
        return failed.code

    def _listen(self) -> None:
        self.said += self.core.to_front
        self.core.to_front.clear()


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 39), min_size=1, max_size=3),
    warm=st.booleans(),
)
def test_output_goes_on_where_it_was_cut(prompt: list[int], cuts: list[int], warm: bool) -> None:
    toy, whole = Toy(), expected_tokens(tuple(prompt), 40)
    if warm:
        toy.tell(submit(1, prompt, 40))
        toy.run()
    known = [known_output(choice, whole[:cut]) for choice, cut in enumerate(cuts)]
    toy.tell(submit(2, prompt, 40, num_choices=len(cuts), known=known))
    toy.run()
    assert [toy.tokens(2, choice) for choice in range(len(cuts))] == [whole[cut:] for cut in cuts]
    usage = toy.usage(2)
    assert (usage.output_tokens, usage.known_tokens) == (40 * len(cuts), sum(cuts))
    assert usage.cached_local <= len(prompt)
    assert not warm or usage.cached_local >= min(len(prompt), (len(prompt) + cuts[0] - 1) // 16 * 16)
    assert toy.core.is_idle


@pytest.mark.parametrize(
    "known",
    [
        [known_output(2, [1])],
        [known_output(0, [1]), known_output(0, [2])],
        [known_output(0, [1] * 10)],
        [known_output(0, [1] * 11, finished=True)],
        [known_output(0, [97])],
        [known_output(0, [2**32 - 1])],
        [known_output(0, [1, 7, 2])],
    ],
)
def test_output_that_cannot_be_is_refused_alone(known: list[Any]) -> None:
    toy = Toy()
    toy.tell(submit(1, PROMPT, 10, num_choices=2, stop_token_ids=[7], known=known))
    toy.tell(submit(2, PROMPT, 10))
    toy.run()
    assert toy.code(1) == "INVALID_ARGUMENT"
    assert toy.tokens(2) == expected_tokens(tuple(PROMPT), 10)


def test_ended_choices_are_left_alone() -> None:
    toy, whole = Toy(), expected_tokens(tuple(PROMPT), 30)
    stop = next(token for token in range(97) if token not in whole)
    ended = [known_output(0, [3, stop], finished=True), known_output(2, whole, finished=True)]
    toy.tell(submit(1, PROMPT, 30, num_choices=4, stop_token_ids=[stop], known=[*ended, known_output(3, whole[:12])]))
    toy.run()
    assert [toy.tokens(1, choice) for choice in range(4)] == [[], whole, [], whole[12:]]
    assert toy.usage(1).output_tokens == 2 + 30 * 3
    toy.tell(submit(2, PROMPT, 30, num_choices=2, known=[known_output(c, [5], finished=True) for c in (0, 1)]))
    assert (toy.usage(2).output_tokens, toy.usage(2).known_tokens) == (2, 2), "at once"
    assert toy.core.is_idle


def test_penalties_tell_known_output_from_the_prompt() -> None:
    """The row to draw with is that of the uncut attempt."""
    sampling = Sampling(temperature=1.0, seed=9, presence_penalty=0.5)
    toy = Toy()
    toy.tell(submit(1, PROMPT, 10, sampling=sampling, known=[known_output(0, [4, 5, 6])]))
    (row,) = EngineCore.draw_rows(toy.core.schedule(0.0))
    assert (row.prompt.tolist(), row.output.tolist(), row.position) == (PROMPT, [4, 5, 6], len(PROMPT) + 3)


def test_known_blocks_are_pulled_and_told_of_no_more_than_the_prompt() -> None:
    toy, whole = Toy(), expected_tokens(tuple(PROMPT), 60)
    text = PROMPT + whole[:50]
    ended = known_output(0, [3], finished=True)
    plan = [HolderRun("worker", "w", 1, "a", "b", 0, 9)]
    known = [ended, known_output(1, whole[:50])]
    toy.tell(submit(1, PROMPT, 60, num_choices=2, known=known, pull_plan=plan))
    (pull,) = [message for message in toy.core.to_mover if isinstance(message, PullBlocks)]
    assert pull.ids == b"".join(chain_block_ids(KEY, ROOT, text)), "of the first choice that goes on"
    assert toy.cached(1) == len(PROMPT)
    for index, slot in enumerate(pull.slots):
        toy.runner.kv[slot] = prefix_entries(text)[index * 16 : (index + 1) * 16]
    toy.tell(PullDone(1, 4, ["peer"] * 4, ""))
    assert sum(chunk.length for chunk in toy.core.schedule(0.0)) == len(text) - 64
    toy.run()
    assert toy.tokens(1, 1) == whole[50:]
    assert toy.usage(1).cached_peer == len(PROMPT)
