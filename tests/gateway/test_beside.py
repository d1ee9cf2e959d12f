"""A target that draws beside its source: the client is told what one of them would have said, whichever comes first."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from google.api.httpbody_pb2 import HttpBody
from hypothesis import given, settings
from hypothesis import strategies as st
from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, PositionLogprobs
from kvmesh.v1.router_pb2 import OUTCOME_CANCELLED, OUTCOME_OK, OUTCOME_WORKER_FAILED
from kvmesh.v1.worker_pb2 import KnownOutput, TokenChunk, WorkerChoiceFinish, WorkerGenerateResponse
from structlog.testing import capture_logs

from services.common.usage import ACCELERATOR_UNIT, Usage
from services.gateway.beside import Beside
from services.gateway.move import Move
from services.gateway.output_record import OutputDiverged, OutputRecord
from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script
from tests.gateway.test_moving import SLOW_S, dones
from tests.gateway.test_rescue import STREAM, plain, reply, text_of, variants
from tests.support.waiting import eventually

MAX_TOKENS = 8
in_mesh = pytest.mark.asyncio(loop_scope="module")


def drawn(choice: int, position: int) -> int:
    """What every worker draws there."""
    return 100 * choice + position


class Drawer:
    """A worker's part: draws, and skips what it is told. `said` is what its reader has not had."""

    def __init__(self, num_choices: int, known: Sequence[KnownOutput]) -> None:
        self.said: deque[WorkerGenerateResponse] = deque()
        self.told = [0] * num_choices
        self.next = [0] * num_choices
        self.learn(known)

    def learn(self, known: Sequence[KnownOutput]) -> None:
        for one in known:
            choice = one.choice
            expected = [drawn(choice, self.told[choice] + i) for i in range(len(one.token_ids))]
            assert list(one.token_ids) == expected, "told without a gap, and nothing twice"
            self.told[choice] += len(expected)
            self.next[choice] = max(self.next[choice], self.told[choice])

    def draw(self, choice: int, count: int = 1) -> None:
        """Tokens of a choice, and its finish after the last."""
        first, end = self.next[choice], min(MAX_TOKENS, self.next[choice] + count)
        if first == end:
            return
        self.next[choice] = end
        chunk = TokenChunk(choice=choice, token_ids=[drawn(choice, i) for i in range(first, end)], position=first)
        self.said.append(WorkerGenerateResponse(tokens=chunk))
        if end == MAX_TOKENS:
            finish = WorkerChoiceFinish(choice=choice, reason=FINISH_REASON_LENGTH)
            self.said.append(WorkerGenerateResponse(finish=finish))


class Client:
    """What the gateway does with the two, without its waiting."""

    def __init__(self, num_choices: int) -> None:
        self.record = OutputRecord(num_choices, MAX_TOKENS, ())
        self.move = Move(self.record)
        self.source, self.given = Drawer(num_choices, ()), list[WorkerGenerateResponse]()
        self.source.draw(0)
        self.read_source()
        self.move.wanted(0.0, 3)
        self.move.asked()
        self.target = Drawer(num_choices, self.move.started())
        self.beside = Beside(self.record, 0.0)
        self.ended: set[int] = set()
        self.now_s = 0.0
        self.is_switched = False

    def read_source(self) -> None:
        if self.source.said:
            self._give(self.source.said.popleft())

    def end(self, choice: int) -> None:
        """The client has all it wants of a choice; the target hears of that with what is said next."""
        self.record.end(choice)
        self.ended.add(choice)

    def hear_source(self) -> None:
        """What it says is told to the target, too."""
        choice = self.source.said[0].tokens.choice if self.source.said else 0
        self.read_source()
        self.beside.heard_source(choice, self.now_s)
        self.target.learn(self.move.told())

    def hear_target(self) -> None:
        if self.target.said and self.beside.heard_target(self.target.said.popleft(), self.now_s):
            self.switch()

    def switch(self) -> None:
        """At a good moment, or any other one at which the source dies."""
        switch = self.move.switch(self.source.said, self.record.news)
        assert switch is not None
        self.given += switch.ready
        self.target.learn(switch.further)
        self.is_switched = True
        for message in self.beside.brought:
            self.give_news(message)

    def give_news(self, message: WorkerGenerateResponse) -> None:
        news = self.record.news(message)
        if news is not None:
            self._give(news)

    def _give(self, message: WorkerGenerateResponse) -> None:
        if self.record.note(message):
            self.given.append(message)


@settings(max_examples=200)
@given(
    num_choices=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.sampled_from(("source", "target", "hear_source", "hear_target", "end", "dies")),
            st.integers(0, 2),
            st.integers(1, 3),
        ),
        min_size=10,
        max_size=60,
    ),
)
def test_whoever_comes_first_no_token_is_lost_or_said_twice(
    num_choices: int, steps: list[tuple[str, int, int]]
) -> None:
    client = Client(num_choices)
    for action, pick, count in steps:
        if client.is_switched:
            break
        client.now_s += 0.01
        if action == "source":
            client.source.draw(pick % num_choices, count)
        elif action == "target":
            client.target.draw(pick % num_choices, count)
        elif action == "end":
            client.end(pick % num_choices)
        elif action == "dies":
            client.source.said.clear() if count == 1 else None
            client.switch()
        else:
            getattr(client, action)()
    if not client.is_switched:
        client.switch()
    for choice in range(num_choices):
        client.target.draw(choice, MAX_TOKENS)
    while client.target.said:
        client.give_news(client.target.said.popleft())
    client.given += client.record.loose_ends()
    for choice in range(num_choices):
        own = [message.tokens for message in client.given if message.HasField("tokens")]
        token_ids = [token_id for tokens in own if tokens.choice == choice for token_id in tokens.token_ids]
        whole = [drawn(choice, position) for position in range(MAX_TOKENS)]
        num_finishes = sum(m.HasField("finish") and m.finish.choice == choice for m in client.given)
        if choice in client.ended:
            assert token_ids == whole[: len(token_ids)]
            assert num_finishes <= 1
        else:
            assert (token_ids, num_finishes) == (whole, 1)


def said(position: int, *token_ids: int, choice: int = 0) -> WorkerGenerateResponse:
    scores = [PositionLogprobs(rank=token_id) for token_id in token_ids]
    chunk = TokenChunk(choice=choice, token_ids=token_ids, logprobs=scores, position=position)
    return WorkerGenerateResponse(tokens=chunk)


def test_news_are_what_lies_beyond_the_record() -> None:
    record = OutputRecord(1, 100, ())
    record.note(said(0, 5, 6, 7))
    assert record.news(said(1, 6, 7)) is None
    news = record.news(said(2, 7, 8, 9))
    assert news is not None
    assert (news.tokens.position, list(news.tokens.token_ids)) == (3, [8, 9])
    assert [score.rank for score in news.tokens.logprobs] == [8, 9]
    for other in (said(1, 6, 8), said(4, 9)):
        with pytest.raises(OutputDiverged):
            record.news(other)


@pytest.mark.parametrize(
    ("now_s", "position", "goes_over"),
    [
        (0.30, 3, True),  # ahead of the source
        (0.22, 2, True),  # with its latest token, hardly later
        (0.28, 2, False),  # much later: there may be a better moment
        (0.28, 1, False),  # behind
        (0.68, 2, True),  # there was none
        (0.68, 1, False),
        (1.20, 1, True),  # it never catches up
    ],
)
def test_the_target_is_gone_over_to_at_a_good_moment(now_s: float, position: int, goes_over: bool) -> None:
    record = OutputRecord(1, 100, ())
    beside = Beside(record, 0.1)
    for number, at_s in enumerate((0.0, 0.1, 0.2)):
        record.note(said(number, 10 + number))
        beside.heard_source(0, at_s)
    assert beside.heard_target(said(position, 10 + position), now_s) == goes_over


def test_what_is_drawn_of_a_choice_after_its_end_is_no_news() -> None:
    record = OutputRecord(2, 100, ())
    record.note(said(0, 5))
    record.end(0)
    for position in range(4):
        assert record.news(said(position, 9)) is None
    assert record.news(said(0, 5, choice=1)) is not None


def test_all_choices_are_to_have_caught_up() -> None:
    record = OutputRecord(2, 100, ())
    beside = Beside(record, 0.0)
    for choice in (0, 1):
        record.note(said(0, 10, choice=choice))
    assert not beside.heard_target(said(0, 10, 11), 0.1)
    assert not beside.heard_target(said(2, 12), 0.2)
    assert beside.heard_target(said(0, 10, 11, choice=1), 0.3)
    assert [list(message.tokens.token_ids) for message in beside.brought] == [[11], [12], [11]]


def test_what_the_target_has_said_first_is_compared_once_the_source_says_it() -> None:
    record = OutputRecord(2, 100, ())
    for choice in (0, 1):
        record.note(said(0, 10, choice=choice))
    for position, is_same in ((1, True), (2, False)):
        beside = Beside(record, 0.0)
        assert not beside.heard_target(said(position, 30 + position), 0.1)
        assert len(beside.brought) == 1
        record.note(said(position, 30 + position if is_same else 99))
        if is_same:
            beside.heard_source(0, 0.2)
            assert beside.brought == []
        else:
            with pytest.raises(OutputDiverged):
                beside.heard_source(0, 0.2)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_what_is_close_is_told_by_the_time_between_two_tokens_of_a_choice(num_choices: int) -> None:
    """The choices' tokens of one step come at one moment."""
    record = OutputRecord(num_choices, 100, ())
    beside = Beside(record, 0.0)
    for number in range(3):
        for choice in range(num_choices):
            record.note(said(number, number, choice=choice))
            beside.heard_source(choice, 0.1 * number)
    for choice in range(1, num_choices):
        beside.heard_target(said(2, 2, choice=choice), 0.21)
    assert beside.heard_target(said(2, 2), 0.22)


@in_mesh
@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("path", "script", "fields"),
    [
        ("chat", plain, {"logprobs": True, "top_logprobs": 1}),
        ("complete", variants, {"n": 2, "stop": ["France is", "more of"]}),
        ("complete", plain, {"max_tokens": 7}),
        ("complete", plain, {"prompt": ["a", "b", "c"]}),
    ],
)
async def test_the_answer_is_the_undisturbed_one(
    mesh: Mesh, path: str, script: Any, fields: dict[str, Any], speed: float
) -> None:
    """Whether the target is the slower or the faster one."""
    mesh.plan[:] = [script(mesh, cached=5)]
    expected = await reply(mesh, path, fields)
    mesh.router.asks.clear()
    num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    go_on = asyncio.Event()
    source = {"cached": 5, "pause_s": SLOW_S, "move_after": 2, "go_on_after": go_on, "hang_after": 6}
    mesh.plan[:] = [script(mesh, **source) for _ in range(num_prompts)]
    mesh.plan += [script(mesh, cached=64, draws_beside=True, pause_s=SLOW_S / speed)]
    others = mesh.workers[1].drawing_beside
    call = asyncio.create_task(reply(mesh, path, fields))
    await eventually(lambda: mesh.workers[1].drawing_beside >= others + num_prompts)
    go_on.set()
    assert await call == expected
    await eventually(lambda: len(dones(mesh)) == 2 * num_prompts)
    outcomes = Counter(done.outcome for done in dones(mesh))
    assert outcomes == {OUTCOME_CANCELLED: num_prompts, OUTCOME_OK: num_prompts}
    await mesh.wait_idle()


@in_mesh
async def test_the_source_is_left_for_a_target_that_has_caught_up(mesh: Mesh) -> None:
    """Its next token comes from the target, which was told all before."""
    mesh.plan[:] = [plain(mesh, move_after=2, hang_after=3), plain(mesh, draws_beside=True)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) == 2)
    assert [done.outcome for done in dones(mesh)] == [OUTCOME_CANCELLED, OUTCOME_OK]
    assert sum(done.output_tokens for done in dones(mesh)) == len(mesh.text.encode_text(ANSWER))


async def read_beside(mesh: Mesh, go_on: asyncio.Event, draw: asyncio.Event) -> str:
    """A stream to its end: its source goes on when the target draws beside, which draws when six tokens are there."""
    drawing, raw = mesh.workers[1], ""
    others, beginning = drawing.drawing_beside, mesh.text.tokenizer.decode(mesh.text.encode_text(ANSWER)[:6])
    async for message in mesh.openai.Completions(HttpBody(data=json.dumps(STREAM).encode())):
        raw += message.data.decode()
        await eventually(lambda: drawing.drawing_beside > others)
        go_on.set()
        if len(text_of(raw)) >= len(beginning):
            draw.set()
    return raw


@in_mesh
async def test_a_target_that_draws_behind_is_told_what_its_source_says(mesh: Mesh) -> None:
    go_on, draw = asyncio.Event(), asyncio.Event()
    told = mesh.workers[1].told_beside
    mesh.plan[:] = [
        plain(mesh, move_after=1, go_on_after=go_on, hang_after=6),
        plain(mesh, draws_beside=True, draw_after=draw, pause_s=SLOW_S),
    ]
    assert text_of(await read_beside(mesh, go_on, draw)) == ANSWER
    assert mesh.workers[1].told_beside > told
    await mesh.wait_idle()


@in_mesh
@pytest.mark.parametrize("source", [{"fail_after": 4}, {}])
@pytest.mark.parametrize("target", [{"fail_after": 0}, {"fail_after": 1}, {}])
async def test_either_may_die_while_both_draw(mesh: Mesh, source: dict[str, int], target: dict[str, int]) -> None:
    drawing, go_on = mesh.workers[1], asyncio.Event()
    others = drawing.drawing_beside
    slow = plain(mesh, draws_beside=True, pause_s=3 * SLOW_S, **target)
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=2, go_on_after=go_on, **source), slow, plain(mesh)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: drawing.drawing_beside > others)
    go_on.set()
    assert (await call)["choices"][0]["text"] == ANSWER
    await mesh.wait_idle()


@in_mesh
async def test_what_a_target_said_first_and_otherwise_is_not_given(mesh: Mesh) -> None:
    """Of one choice, while the source is still the one that is read: it has all the say."""
    go_on, whole, drawing = asyncio.Event(), variants(mesh).by_choice, mesh.workers[1]
    mesh.plan[:] = [
        variants(mesh, move_after=2, go_on_after=go_on, hang_after=5),
        Script(by_choice=[[*whole[0][:2], *whole[1]], whole[1]], draws_beside=True, others_after=asyncio.Event()),
        variants(mesh, draws_beside=True),
    ]
    before = drawing.said_beside
    mesh.router.workers["w2"] = mesh.router.workers["w1"]
    try:
        call = asyncio.create_task(mesh.complete(n=2))
        await eventually(lambda: drawing.said_beside > before)
        go_on.set()
        answer = await call
    finally:
        del mesh.router.workers["w2"]
    texts = [mesh.text.tokenizer.decode(tokens) for tokens in whole]
    assert [choice["text"] for choice in answer["choices"]] == texts
    await eventually(lambda: len(dones(mesh)) == 3)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert outcomes == {1: OUTCOME_CANCELLED, 2: OUTCOME_CANCELLED, 3: OUTCOME_OK}


@in_mesh
async def test_a_target_that_goes_astray_once_it_is_read_is_left_for_another(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, move_after=2, hang_after=6), plain(mesh, draws_beside=True, leaves_out=8), plain(mesh)]
    with capture_logs() as lines:
        assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) == 3)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert outcomes == {1: OUTCOME_CANCELLED, 2: OUTCOME_WORKER_FAILED, 3: OUTCOME_OK}
    assert [line["reason"] for line in lines if line["event"] == "move_failed"] == ["diverged"]


@in_mesh
async def test_a_target_that_draws_otherwise_is_not_gone_over_to(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source goes on, and the next target is only to draw when that has ended. What it cost is counted."""
    counted = list[Usage]()
    monkeypatch.setattr(mesh.gateway.usage, "count", lambda tenant, model, usage, run: counted.append(usage))
    other = mesh.text.encode_text("Something else altogether is what this one says, if it is asked, and that at length")
    go_on, draw = asyncio.Event(), asyncio.Event()
    mesh.plan[:] = [
        plain(mesh, move_after=1, go_on_after=go_on, hang_after=6),
        Script(other, draws_beside=True, draw_after=draw, accelerator_s=2.0),
        plain(mesh, draws_beside=True),
    ]
    mesh.router.workers["w2"] = mesh.router.workers["w1"]
    try:
        raw = await read_beside(mesh, go_on, draw)
    finally:
        del mesh.router.workers["w2"]
    assert text_of(raw) == ANSWER
    await eventually(lambda: len(dones(mesh)) == 3)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert outcomes == {1: OUTCOME_CANCELLED, 2: OUTCOME_CANCELLED, 3: OUTCOME_OK}
    await eventually(lambda: counted)
    assert [usage.accelerator_us for usage in counted] == [2 * ACCELERATOR_UNIT]
