"""Grammars of requests on the toy model: real matchers over its vocabulary, and the core that waits for them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from services.common.grammars import compile_grammar, lark_grammar, regex_grammar
from services.worker.core import EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.engine.grammars import BURST_S, TOKEN_S, Follower, Grammars
from services.worker.messages import (
    Abort,
    AdmittedRequest,
    HolderRun,
    Message,
    RequestFailed,
    RequestUsage,
    Sampling,
    StepOutput,
    Submit,
)
from services.worker.mover_messages import PullBlocks, PullDone
from services.worker.sampler import draw_tokens
from tests.worker.cores import known_output, make_core, run_to_end, submit
from tests.worker.toy import VOCAB, ToyRunner

# Token i of the toy is a printable character; the last two are a line's end and the end of an answer.
TEXT = [bytes([32 + i]) for i in range(95)] + [b"\n", b""]
EOS = VOCAB - 1
PROMPT = list(range(21))
# Two letters that may come in any order, so that what is drawn depends on the model, and long enough to be preempted.
LETTERS = "[ab]{12,30}c"
# Which of the letters so far may be those that count is more than the limits let it remember.
EXPLODING = r"""
start: A
A: /(.|\n)*a(.|\n){0,200}b(.|\n)*/ & /(.|\n)*b(.|\n){0,200}a(.|\n)*/ & ~/(.|\n)*c(.|\n){50}d(.|\n)*/
"""


class ToyText:
    """The toy's tokenizer, as llguidance wants one."""

    is_tokenizer_wrapper = True
    eos_token_id = EOS
    bos_token_id = None
    tokens = TEXT
    special_token_ids = (EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [TEXT.index(bytes([byte])) for byte in raw]


def tokenizer() -> LLTokenizer:
    return LLTokenizer(ToyText(), n_vocab=VOCAB)  # type: ignore[arg-type]


def text_of(tokens: list[int]) -> str:
    return b"".join(TEXT[token] for token in tokens).decode()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer(), VOCAB)
    yield made
    made.close()


def held(key: int, grammar: str, max_tokens: int = 60, **changes: object) -> Submit:
    """A request for an answer that follows a grammar."""
    sampling = changes.pop("sampling", {"temperature": 1.0, "seed": 7})
    assert isinstance(sampling, dict)
    return submit(
        key, PROMPT, max_tokens, stop_token_ids=[EOS], sampling=Sampling(grammar=grammar, **sampling), **changes
    )


@dataclass
class Toy:
    """A core over the toy model, and what it has said."""

    core: EngineCore
    runner: ToyRunner = field(default_factory=lambda: ToyRunner(64))
    said: list[Message] = field(default_factory=list)

    def settle(self) -> None:
        """Take grammars until none is compiled any more."""
        ends_s = time.monotonic() + 30
        while self.core.is_preparing:
            assert time.monotonic() < ends_s
            time.sleep(0.001)
            self.core.take_grammars()

    def run(self, *messages: Submit) -> None:
        """Hand the messages in and step until nothing is left."""
        for message in messages:
            self.core.handle(message, 0.0)
        self.settle()
        builder = StepBuilder()
        while chunks := self.core.schedule(0.0):
            self.runner.submit(builder.build(chunks))
            self.core.commit(chunks, draw_tokens(self.runner.collect(), EngineCore.draw_rows(chunks)), 0.01, 0.0)
        self.said, self.core.to_front = self.core.to_front, []

    def tokens(self, key: int, choice: int = 0) -> list[int]:
        outputs = [o for m in self.said if isinstance(m, StepOutput) for o in m.choices]
        return [t for o in outputs if (o.key, o.choice) == (key, choice) for t in o.token_ids]

    def failures(self) -> dict[int, RequestFailed]:
        return {m.key: m for m in self.said if isinstance(m, RequestFailed)}

    def completed(self) -> list[RequestUsage]:
        return [usage for m in self.said if isinstance(m, StepOutput) for usage in m.completed]


def toy(grammars: Grammars, num_blocks: int = 64) -> Toy:
    return Toy(make_core(num_blocks, max_queue_s=100.0, grammars=grammars), ToyRunner(num_blocks))


@settings(max_examples=8, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    num_choices=st.integers(1, 3),
    num_blocks=st.integers(6, 24),
)
def test_every_answer_matches_whatever_is_preempted(
    grammars: Grammars, seeds: list[int], temperature: float, num_choices: int, num_blocks: int
) -> None:
    made = toy(grammars, num_blocks)
    made.run(
        *(
            held(
                key,
                regex_grammar(LETTERS),
                num_choices=num_choices,
                sampling={"temperature": temperature, "seed": seed, "repetition_penalty": 1.3},
            )
            for key, seed in enumerate(seeds)
        )
    )
    alone = [toy(grammars) for _ in seeds]
    for key, (seed, other) in enumerate(zip(seeds, alone, strict=True)):
        sampling = {"temperature": temperature, "seed": seed, "repetition_penalty": 1.3}
        other.run(held(key, regex_grammar(LETTERS), num_choices=num_choices, sampling=sampling))
        for choice in range(num_choices):
            tokens = made.tokens(key, choice)
            assert tokens[-1] == EOS
            assert re.fullmatch(LETTERS, text_of(tokens))
            assert tokens == other.tokens(key, choice)
    assert made.core.is_idle


@given(cut=st.integers(1, 12))
@settings(max_examples=6, deadline=None)
def test_an_answer_goes_on_elsewhere_as_it_would_have_here(grammars: Grammars, cut: int) -> None:
    first, second = toy(grammars), toy(grammars)
    first.run(held(1, regex_grammar(LETTERS)))
    whole = first.tokens(1)
    second.run(held(1, regex_grammar(LETTERS), known=[known_output(0, whole[:cut])]))
    assert whole[:cut] + second.tokens(1) == whole


def test_known_output_that_does_not_match_fails_the_request(grammars: Grammars) -> None:
    made = toy(grammars)
    made.run(held(1, regex_grammar(LETTERS), known=[known_output(0, [TEXT.index(b"z")])]))
    assert made.failures()[1].code == "INVALID_ARGUMENT"
    assert made.core.is_idle


def test_an_answer_cut_by_its_length_is_a_beginning_of_one_that_matches(grammars: Grammars) -> None:
    made = toy(grammars)
    made.run(held(1, regex_grammar(LETTERS), max_tokens=10))
    assert re.fullmatch("[ab]{10}", text_of(made.tokens(1)))


def test_a_grammar_that_is_refused_fails_its_request_alone(grammars: Grammars) -> None:
    made, alone = toy(grammars), toy(grammars)
    made.run(
        held(1, regex_grammar("a(")), held(2, regex_grammar(LETTERS)), submit(3, PROMPT, 20), held(4, "no grammar")
    )
    alone.run(held(2, regex_grammar(LETTERS)), submit(3, PROMPT, 20))
    assert {key: failure.code for key, failure in made.failures().items()} == {
        1: "INVALID_ARGUMENT", 4: "INVALID_ARGUMENT",
    }  # fmt: skip
    assert "unclosed group" in made.failures()[1].detail
    assert (made.tokens(2), made.tokens(3)) == (alone.tokens(2), alone.tokens(3))
    assert len(made.completed()) == 2
    assert made.core.is_idle


def test_a_grammar_that_explodes_on_the_way_ends_its_request_alone(grammars: Grammars) -> None:
    made, alone = toy(grammars), toy(grammars)
    made.run(held(1, lark_grammar(EXPLODING)), held(2, regex_grammar(LETTERS)))
    alone.run(held(2, regex_grammar(LETTERS)))
    assert made.failures()[1].code == "INVALID_ARGUMENT"
    assert 0 < len(made.tokens(1)) < 60
    assert made.tokens(2) == alone.tokens(2)
    assert made.core.is_idle


def test_a_worker_that_follows_no_grammars_says_so() -> None:
    core = make_core()
    core.handle(held(1, regex_grammar("a")), 0.0)
    (failed,) = core.to_front
    assert isinstance(failed, RequestFailed)
    assert "no grammars" in failed.detail
    assert core.is_idle


def test_a_request_waits_for_its_grammar_and_its_pull(grammars: Grammars) -> None:
    made = toy(grammars)
    holder = HolderRun("worker", "w", 1, "ucx", "grpc", 0, 1)
    made.core.handle(held(1, regex_grammar("a{3}"), pull_plan=[holder]), 0.0)
    made.settle()
    assert any(isinstance(message, PullBlocks) for message in made.core.to_mover)
    assert made.core.schedule(0.0) == []
    made.core.handle(PullDone(1, 0, [], "nothing there"), 0.0)
    made.run()
    assert text_of(made.tokens(1)) == "aaa"


def test_an_abort_while_a_grammar_is_compiled_leaves_nothing(grammars: Grammars) -> None:
    made = toy(grammars)
    made.core.handle(held(1, regex_grammar("(never|seen|before){3}")), 0.0)
    made.core.handle(Abort(1), 0.0)
    made.settle()
    assert run_to_end(made.core, made.runner) == {}
    assert not any(isinstance(message, RequestFailed | StepOutput) for message in made.core.to_front)


def test_a_model_without_a_tokenizer_fails_who_needs_it() -> None:
    broken = Grammars(None, VOCAB)
    made = toy(broken)
    made.run(held(1, regex_grammar("a")), submit(2, PROMPT, 5))
    assert {key: failure.code for key, failure in made.failures().items()} == {1: "INTERNAL"}
    assert [usage.key for usage in made.completed()] == [2]
    broken.close()


def test_a_kept_grammar_is_there_at_once(grammars: Grammars) -> None:
    made = toy(grammars)
    made.run(held(1, regex_grammar("x{4}")))
    made.core.handle(held(2, regex_grammar("x{4}")), 0.0)
    assert not made.core.is_preparing
    assert any(isinstance(message, AdmittedRequest) for message in made.core.to_front)
    made.run()
    assert text_of(made.tokens(2)) == "xxxx"


class SlowClock:
    """Time of a matcher that takes so long for each token."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._calls = 0

    def __call__(self) -> float:
        self._calls += 1
        return self._calls // 2 * self._token_s


@pytest.mark.parametrize(("token_s", "fails"), [(TOKEN_S, False), (TOKEN_S + BURST_S / 10, True)])
def test_a_grammar_may_take_so_much_time(token_s: float, fails: bool) -> None:
    matcher = compile_grammar(tokenizer(), regex_grammar("a+"))
    follower = Follower(matcher, VOCAB, SlowClock(token_s))
    output = np.full(100, TEXT.index(b"a"), dtype=np.int32)
    outcomes = [follower.allowed(output[:length]) is not None for length in range(100)]
    assert all(outcomes) is not fails
    assert bool(follower.failure) is fails
    if fails:
        assert outcomes.index(False) >= 10
