"""A worker that would rather not go on: its streams move while they run, and the client sees no difference."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.router_pb2 import (
    OUTCOME_CANCELLED,
    OUTCOME_OK,
    OUTCOME_STALE,
    OUTCOME_WORKER_FAILED,
    REFUSAL_REASON_NO_WORKER,
    REFUSAL_REASON_OVERLOADED,
    Done,
    Refusal,
)
from kvmesh.v1.worker_pb2 import (
    MOVE_REASON_DEFRAGMENTATION,
    MOVE_REASON_DRAINING,
    MOVE_REASON_PRIORITY,
    MOVE_REASON_SHORT_OF_BLOCKS,
    MoveReason,
    WorkerGenerateRequest,
    WorkerGenerateResponse,
)

from services.gateway import second_attempt
from services.gateway.placed_stream import PlacedStream
from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script
from tests.gateway.test_rescue import STREAM, plain, reply, text_of, variants
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_S = 0.03


def dones(mesh: Mesh) -> list[Done]:
    """How this test's attempts were closed; those of the test before may be told late."""
    own = {ask.request_id for ask in mesh.router.asks}
    return [done for done in mesh.router.dones if done.request_id in own]


def requests(mesh: Mesh) -> list[WorkerGenerateRequest]:
    return [request for worker in mesh.workers for request in worker.requests]


@pytest.mark.parametrize("prepare_s", [0.0, 0.1])
@pytest.mark.parametrize(
    ("path", "script", "fields"),
    [
        ("chat", plain, {"logprobs": True, "top_logprobs": 1}),
        ("complete", variants, {"n": 2}),
        ("complete", variants, {"n": 2, "stop": ["France is", "more of"]}),
        ("complete", plain, {"max_tokens": 7}),
        ("complete", plain, {"prompt": ["a", "b", "c"]}),
    ],
)
async def test_the_answer_is_the_undisturbed_one(
    mesh: Mesh, path: str, script: Any, fields: dict[str, Any], prepare_s: float
) -> None:
    mesh.plan[:] = [script(mesh, cached=5)]
    expected = await reply(mesh, path, fields)
    mesh.router.asks.clear()
    prompts = fields["prompt"] if isinstance(fields.get("prompt"), list) else ["one"]
    mesh.plan[:] = [script(mesh, cached=5, pause_s=SLOW_S, move_after=2) for _ in prompts]
    mesh.plan += [script(mesh, cached=64, prepare_s=prepare_s)]
    assert await reply(mesh, path, fields) == expected
    moved = mesh.workers[1].requests
    assert len(moved) == len(prompts)
    assert all(request.hold_s > 0 and request.known for request in moved)
    assert all(list(ask.excluded_workers) == ["w0"] for ask in mesh.router.asks if ask.resumes)
    await mesh.wait_idle()


async def test_the_source_goes_on_until_the_target_is_prepared(mesh: Mesh) -> None:
    """And each granted attempt is closed by one Done."""
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1), plain(mesh, prepare_s=3 * SLOW_S)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    source, target = requests(mesh)
    assert (source.hold_s, target.attempt) == (0.0, 2)
    await eventually(lambda: len(dones(mesh)) == 2)
    assert [(done.attempt, done.outcome) for done in dones(mesh)] == [(1, OUTCOME_CANCELLED), (2, OUTCOME_OK)]
    before, after = (done.output_tokens for done in dones(mesh))
    assert before > len(target.known[0].token_ids), "it said more while the target computed what was known"
    assert before + after == len(mesh.text.encode_text(ANSWER))
    assert dones(mesh)[1].ttft_s == 0.0


async def test_what_the_source_has_said_counts_as_its_own_though_nobody_had_read_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, prepare = PlacedStream.read, asyncio.Event()

    async def read_late(stream: PlacedStream) -> WorkerGenerateResponse:
        message = await read(stream)
        if message.HasField("tokens") and stream._open is not None and not prepare.is_set():
            inbox = stream._open.inbox
            await eventually(lambda: sum(one.HasField("tokens") for one in inbox.unread) == 4, 10)
            prepare.set()
            await eventually(lambda: len(dones(mesh)) == 1, 10)
        return message

    monkeypatch.setattr(PlacedStream, "read", read_late)
    mesh.plan[:] = [plain(mesh, move_after=0, hang_after=5), plain(mesh, prepare_after=prepare)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) == 2)
    before, after = (done.output_tokens for done in dones(mesh))
    assert before == 5
    assert before + after == len(mesh.text.encode_text(ANSWER))


@pytest.mark.parametrize(
    ("reason", "relieves"),
    [
        (MOVE_REASON_DRAINING, False),
        (MOVE_REASON_SHORT_OF_BLOCKS, True),
        (MOVE_REASON_PRIORITY, True),
        (MOVE_REASON_DEFRAGMENTATION, True),
    ],
)
async def test_only_who_must_go_is_content_with_a_worker_without_room(
    mesh: Mesh, reason: MoveReason.ValueType, *, relieves: bool
) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1, move_reason=reason), plain(mesh)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    assert [ask.needs_room_now for ask in mesh.router.asks] == [False, relieves]
    await mesh.wait_idle()


async def test_a_worker_that_leaves_may_have_other_wishes_too(mesh: Mesh) -> None:
    """The stream is to leave all the same, were it for a worker without room."""
    go_on, raw = asyncio.Event(), ""
    mesh.plan[:] = [
        plain(mesh, move_after=1, later_reason=MOVE_REASON_SHORT_OF_BLOCKS, go_on_after=go_on, hang_after=4),
        plain(mesh),
    ]
    beginning = mesh.text.tokenizer.decode(mesh.text.encode_text(ANSWER)[:4])
    elsewhere = mesh.router.workers.pop("w1")
    try:
        async for message in mesh.openai.Completions(HttpBody(data=json.dumps(STREAM).encode())):
            raw += message.data.decode()
            await eventually(lambda: len(mesh.router.asks) > 1)
            go_on.set()
            if len(text_of(raw)) >= len(beginning):
                mesh.router.workers["w1"] = elsewhere
    finally:
        mesh.router.workers["w1"] = elsewhere
    assert text_of(raw) == ANSWER
    assert len(mesh.router.asks) > 2
    assert not any(ask.needs_room_now for ask in mesh.router.asks)
    await mesh.wait_idle()


async def test_the_source_is_left_right_after_a_token(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left in the middle of a step, it would have drawn one in vain that the client waits for."""
    monkeypatch.setattr(second_attempt, "_ALIGN_S", 60.0)
    go_on = asyncio.Event()
    mesh.plan[:] = [plain(mesh, pause_s=0.2, move_after=1, go_on_after=go_on), plain(mesh)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.workers[1].running)
    # The target is prepared at once, and the source says nothing.
    await asyncio.sleep(0.2)
    assert not dones(mesh)
    go_on.set()
    assert (await call)["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) == 2)
    assert dones(mesh)[0].output_tokens > 1


async def test_a_source_that_says_no_more_is_left_all_the_same(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, move_after=1, hang_after=2), plain(mesh)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) == 2)
    assert [done.outcome for done in dones(mesh)] == [OUTCOME_CANCELLED, OUTCOME_OK]


async def test_a_target_that_fails_while_it_waits_for_the_moment(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source goes on as if nothing had been."""
    monkeypatch.setattr(second_attempt, "_ALIGN_S", 60.0)
    go_on = asyncio.Event()
    mesh.plan[:] = [plain(mesh, move_after=1, go_on_after=go_on), plain(mesh)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.workers[1].running)
    address, channels = mesh.router.workers["w1"], mesh.gateway.channels
    channels.acquire(address).close()
    channels.release(address, asyncio.get_running_loop().time())
    await eventually(lambda: [done.outcome for done in dones(mesh)] == [OUTCOME_WORKER_FAILED])
    go_on.set()
    assert (await call)["choices"][0]["text"] == ANSWER
    await mesh.wait_idle()


@pytest.mark.parametrize("takes_more", [True, False])
async def test_a_target_is_told_more_until_little_is_left(mesh: Mesh, takes_more: bool) -> None:
    """One of an earlier release is not: what it does not know it computes at the switch."""
    asked, read = asyncio.Event(), asyncio.Event()
    mesh.plan[:] = [
        plain(mesh, move_after=1, go_on_after=asked, hang_after=6),
        plain(mesh, prepare_after=read, takes_more=takes_more),
    ]
    rounds, raw = mesh.workers[1].rounds, ""
    beginning = mesh.text.tokenizer.decode(mesh.text.encode_text(ANSWER)[:6])
    async for message in mesh.openai.Completions(HttpBody(data=json.dumps(STREAM).encode())):
        raw += message.data.decode()
        await eventually(lambda: len(mesh.workers[1].requests) == 1)
        asked.set()
        if len(text_of(raw)) >= len(beginning):
            read.set()
    assert text_of(raw) == ANSWER
    assert mesh.workers[1].rounds - rounds == takes_more
    await mesh.wait_idle()


async def test_a_target_that_fails_costs_nothing(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1), plain(mesh, fail_held=True)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(dones(mesh)) >= 2)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert (outcomes[1], outcomes[2]) == (OUTCOME_OK, OUTCOME_WORKER_FAILED)


async def test_a_stale_target_is_asked_for_again(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=0.1, move_after=1), Script(stale=True), plain(mesh)]
    mesh.router.workers["w2"] = mesh.router.workers["w1"]
    try:
        assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    finally:
        del mesh.router.workers["w2"]
    await eventually(lambda: len(dones(mesh)) == 3)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert outcomes == {1: OUTCOME_CANCELLED, 2: OUTCOME_STALE, 3: OUTCOME_OK}


async def test_a_target_that_leaves_too_is_not_taken(mesh: Mesh) -> None:
    """Its wish, made before it was prepared, would not be heard again."""
    mesh.plan[:] = [plain(mesh, pause_s=0.1, move_after=1), plain(mesh, leave_held=True, prepare_s=0.1), plain(mesh)]
    mesh.router.workers["w2"] = mesh.router.workers["w1"]
    try:
        assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    finally:
        del mesh.router.workers["w2"]
    await eventually(lambda: len(dones(mesh)) == 3)
    outcomes = {done.attempt: done.outcome for done in dones(mesh)}
    assert outcomes == {1: OUTCOME_CANCELLED, 2: OUTCOME_CANCELLED, 3: OUTCOME_OK}
    assert list(mesh.router.asks[2].excluded_workers) == ["w0", "w1"]


@pytest.mark.parametrize("reason", [REFUSAL_REASON_NO_WORKER, REFUSAL_REASON_OVERLOADED])
async def test_who_finds_no_target_stays_and_asks_again(mesh: Mesh, reason: int) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=0.15, move_after=1), plain(mesh)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.workers[0].running)
    mesh.router.refusal = Refusal(reason=reason)  # type: ignore[arg-type]
    await eventually(lambda: len(mesh.router.asks) >= 2)
    mesh.router.refusal = None
    assert (await call)["choices"][0]["text"] == ANSWER
    assert len(mesh.router.asks) >= 3
    assert len(mesh.workers[1].requests) == 1


async def test_a_source_that_dies_meanwhile_is_replaced_at_once(mesh: Mesh) -> None:
    """By the target that is not prepared yet."""
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1, fail_after=4), plain(mesh, prepare_s=0.5)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    assert len(mesh.router.asks) == 2
    await eventually(lambda: len(dones(mesh)) == 2)
    assert [done.outcome for done in dones(mesh)] == [OUTCOME_WORKER_FAILED, OUTCOME_OK]


async def test_a_target_lost_after_the_switch_is_a_rescue(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1), plain(mesh, fail_after=1), plain(mesh)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    assert len(mesh.router.asks) == 3
    assert [request.hold_s > 0 for request in requests(mesh)].count(True) == 1


async def test_a_client_that_leaves_in_the_middle_of_a_move(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1), plain(mesh, prepare_s=30.0)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.workers[1].running)
    call.cancel()
    await mesh.wait_idle()
    await eventually(lambda: len(dones(mesh)) == 2)
    assert {done.outcome for done in dones(mesh)} == {OUTCOME_CANCELLED}


async def test_a_source_that_finishes_first_needs_no_target(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, pause_s=SLOW_S, move_after=1), plain(mesh, prepare_s=30.0)]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await mesh.wait_idle()
    await eventually(lambda: len(dones(mesh)) == 2)
    assert {done.attempt: done.outcome for done in dones(mesh)} == {1: OUTCOME_OK, 2: OUTCOME_CANCELLED}
