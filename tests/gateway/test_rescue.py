"""A worker that is lost in the middle of an answer: it goes on elsewhere, and the client sees no difference."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.router_pb2 import OUTCOME_OK, OUTCOME_WORKER_FAILED, REFUSAL_REASON_NO_WORKER, Refusal

from services.common.blocks import BlockId, chain_block_ids, join_ids
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import ANSWER, Mesh, running_mesh
from tests.gateway.fakes import SECRET, Script
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM = {"model": "smollm2-135m", "prompt": "hi", "stream": True}
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"


def variants(mesh: Mesh, **changes: Any) -> Script:
    """Another text for each of two choices."""
    texts = (ANSWER, "Elsewhere there is something else to be said, and more of it, and still more, and no end of it")
    return Script(by_choice=[mesh.text.encode_text(text) for text in texts], **changes)


def plain(mesh: Mesh, **changes: Any) -> Script:
    return Script(mesh.text.encode_text(ANSWER), **changes)


async def reply(mesh: Mesh, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one request to the next."""
    call = mesh.chat(**fields) if path == "chat" else mesh.complete(**fields)
    value = await call
    return {"choices": value["choices"], "usage": value["usage"]}


def text_of(raw: str) -> str:
    """All text of an event stream without errors."""
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    ("path", "script", "fields"),
    [
        ("chat", plain, {}),
        ("complete", plain, {"prompt": LONG, "max_tokens": 7}),
        ("complete", variants, {"n": 2}),
        ("complete", variants, {"n": 2, "stop": ["France is", "more of"]}),
        ("complete", plain, {"stop": ["of France is"]}),
        ("chat", plain, {"logprobs": True, "top_logprobs": 2}),
        ("complete", plain, {"prompt": ["a", "b", "c"], "logprobs": 1}),
    ],
)
@pytest.mark.parametrize("said", [(1,), (3, 2), (1, 1, 1, 1, 1, 1)])
async def test_the_answer_is_the_undisturbed_one(
    mesh: Mesh, path: str, script: Any, fields: dict[str, Any], said: tuple[int, ...]
) -> None:
    mesh.plan[:] = [script(mesh, cached=5)]
    expected = await reply(mesh, path, fields)
    # Later attempts find more in the cache; the client is told of the first.
    first, *others = said
    prompts = fields["prompt"] if isinstance(fields.get("prompt"), list) else ["one"]
    mesh.plan[:] = [
        *(script(mesh, cached=5, fail_after=first) for _ in prompts),
        *(script(mesh, cached=64, fail_after=after) for after in others),
        script(mesh, cached=64),
    ]
    mesh.router.dones.clear()
    assert await reply(mesh, path, fields) == expected
    await mesh.wait_idle()
    await eventually(lambda: OUTCOME_WORKER_FAILED in {done.outcome for done in mesh.router.dones})


async def test_the_next_worker_is_told_what_is_known(mesh: Mesh) -> None:
    tokens = mesh.text.encode_text(f"{LONG} {LONG} {ANSWER}")
    mesh.plan[:] = [Script(tokens, fail_after=30), Script(tokens)]
    assert (await mesh.complete(prompt=LONG, max_tokens=40))["usage"]["completion_tokens"] == 40
    first, second = (request for worker in mesh.workers for request in worker.requests)
    assert [list(known.token_ids) for known in second.known] == [tokens[:30]]
    assert not second.known[0].finished
    assert (second.sampling.seed, second.max_tokens) == (first.sampling.seed, first.max_tokens)
    assert second.prompt_block_ids == first.prompt_block_ids
    before, after = mesh.router.asks
    assert (before.resumes, after.resumes) == (False, True)
    assert after.prompt_tokens == before.prompt_tokens + 30
    assert after.max_output_tokens == 10
    sequence = [*first.prompt_token_ids, *tokens[:30]]
    ids = join_ids(chain_block_ids(SECRET.block_key, BlockId(first.block_root), sequence))
    assert after.block_ids == ids
    assert len(ids) > len(before.block_ids) > 0
    assert list(after.excluded_workers) == ["w0"]


async def test_a_choice_that_has_ended_is_not_drawn_again(mesh: Mesh) -> None:
    script = variants(mesh)
    short, _ = map(len, script.by_choice)
    mesh.plan[:] = [variants(mesh, fail_after=short + 2), script]
    await mesh.complete(n=2, stop=["France is"])
    known = mesh.workers[1].requests[0].known
    assert [one.finished for one in known] == [True, False]
    assert len(known[0].token_ids) < short
    assert len(known[1].token_ids) == short + 2
    ask = mesh.router.asks[-1]
    assert (ask.num_choices, ask.prompt_tokens) == (1, 1 + short + 2)


@pytest.mark.parametrize("ends", ["length", "stop"])
async def test_an_attempt_lost_before_its_last_word_alone_is_complete(mesh: Mesh, ends: str) -> None:
    tokens = mesh.text.encode_text(ANSWER)[:6]
    if ends == "stop":
        tokens[-1] = mesh.text.eos_token_ids[0]
    fields = {"max_tokens": 6 if ends == "length" else 9}
    mesh.plan[:] = [Script(tokens + [1] * (ends == "length"))]
    expected = await reply(mesh, "complete", fields)
    assert expected["choices"][0]["finish_reason"] == ends
    mesh.plan[:] = [Script(tokens, fail_after=6)]
    asked = len(mesh.router.asks)
    assert await reply(mesh, "complete", fields) == expected
    assert len(mesh.router.asks) == asked + 1


async def test_failures_without_progress_are_one_error_event(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, fail_after=2), plain(mesh, fail_after=0)]
    raw = (await mesh.post("Completions", STREAM)).decode()
    events = raw.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "worker_failed"
    assert raw.count('"error"') == 1
    assert "[DONE]" not in raw
    await eventually(lambda: len(mesh.router.dones) == 3)
    assert {done.outcome for done in mesh.router.dones} == {OUTCOME_WORKER_FAILED}


async def test_accepted_work_waits_for_the_only_worker(mesh: Mesh) -> None:
    """Nobody else waits for it: a request that no worker has taken is refused meanwhile."""
    mesh.plan[:] = [plain(mesh, fail_after=2, pause_s=0.05), plain(mesh)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.router.asks)
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_NO_WORKER)
    await eventually(lambda: len(mesh.router.asks) >= 3)
    code, error, _ = await mesh.error("Completions", STREAM)
    assert (code, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_unavailable")
    assert not call.done()
    mesh.router.refusal = None
    assert (await call)["choices"][0]["text"] == ANSWER
    assert list(mesh.router.asks[-1].excluded_workers) == [], "it may be the one that failed"
    await eventually(lambda: mesh.router.dones[-1].outcome == OUTCOME_OK)


async def test_a_client_may_leave_while_its_work_waits(mesh: Mesh) -> None:
    mesh.plan[:] = [plain(mesh, fail_after=2, pause_s=0.05)]
    call = asyncio.create_task(mesh.complete())
    await eventually(lambda: mesh.router.asks)
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_NO_WORKER)
    await eventually(lambda: len(mesh.router.asks) >= 4)
    call.cancel()
    await mesh.wait_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def brief(text_model: TextModel) -> AsyncIterator[Mesh]:
    """A mesh of short patience."""
    async with running_mesh(text_model, workers=2, rescue_wait_s=0.4, worker_silence_s=1.5) as mesh:
        yield mesh


async def test_the_wait_for_a_worker_has_an_end(brief: Mesh) -> None:
    brief.plan[:] = [plain(brief, fail_after=2, pause_s=0.05)]
    call = asyncio.create_task(brief.post("Completions", STREAM))
    await eventually(lambda: brief.router.asks)
    brief.router.refusal = Refusal(reason=REFUSAL_REASON_NO_WORKER)
    raw = (await call).decode()
    assert raw.count('"error"') == 1
    assert '"model_unavailable"' in raw
    brief.router.refusal = None
    await brief.wait_idle()


async def test_streams_of_a_frozen_worker_go_on(brief: Mesh) -> None:
    """It keeps its connection, and what it says later reaches nobody."""
    brief.plan[:] = [plain(brief, hang_after=3)] * 4 + [plain(brief)]
    calls = [brief.openai.Completions(HttpBody(data=json.dumps(STREAM).encode())) for _ in range(4)]
    raw = [""] * len(calls)
    for number, call in enumerate(calls):
        while '"text":"' not in raw[number]:
            raw[number] += (await call.read()).data.decode()
    brief.workers[0].frozen = True
    for number, call in enumerate(calls):
        while "[DONE]" not in raw[number]:
            raw[number] += (await call.read()).data.decode()
    assert {text_of(one) for one in raw} == {ANSWER}
    assert brief.gateway.channels.silent_links == 1
    brief.workers[0].frozen = False
    await brief.wait_idle()
