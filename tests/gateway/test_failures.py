"""What the client sees when workers, routers or clients fail, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1.inference_pb2 import TokenizeRequest
from kvmesh.v1.router_pb2 import (
    OUTCOME_CANCELLED,
    OUTCOME_OK,
    OUTCOME_STALE,
    OUTCOME_WORKER_FAILED,
    REFUSAL_REASON_OVERLOADED,
    ModelSnapshot,
    Refusal,
)

from services.common.blocks import owner_digest
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import ANSWER, Mesh, running_mesh
from tests.gateway.fakes import SECRET, Script, served_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM = {"model": "smollm2-135m", "prompt": "hi", "stream": True}


def body(**fields: object) -> HttpBody:
    return HttpBody(data=json.dumps({**STREAM, **fields}).encode())


def answer_tokens(mesh: Mesh) -> list[int]:
    return mesh.text.encode_text(ANSWER)


@pytest.mark.parametrize(
    "broken",
    [
        Script(fail_before_admission=grpc.StatusCode.UNAVAILABLE),
        Script(fail_before_admission=grpc.StatusCode.FAILED_PRECONDITION),
        Script(tokens=[1, 2, 3], fail_after=0),
    ],
)
async def test_failure_before_the_first_token_is_unseen(mesh: Mesh, broken: Script) -> None:
    mesh.plan[:] = [broken, Script(answer_tokens(mesh))]
    reply = await mesh.complete()
    assert reply["choices"][0]["text"] == ANSWER
    assert [list(ask.excluded_workers) for ask in mesh.router.asks] == [[], ["w0"]]
    assert [ask.attempt for ask in mesh.router.asks] == [1, 2]
    await eventually(lambda: len(mesh.router.dones) == 2)
    assert [done.outcome for done in mesh.router.dones] == [OUTCOME_WORKER_FAILED, OUTCOME_OK]
    assert len({request.sampling.seed for worker in mesh.workers for request in worker.requests}) == 1


async def test_workers_of_too_old_a_release_are_passed_over(mesh: Mesh) -> None:
    """However many there are: they have not failed."""
    too_old = Script(fail_before_admission=grpc.StatusCode.UNIMPLEMENTED)
    mesh.plan[:] = [too_old, Script(answer_tokens(mesh))]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    assert [list(ask.excluded_workers) for ask in mesh.router.asks] == [[], ["w0"]]
    await eventually(lambda: len(mesh.router.dones) == 2)
    assert [done.outcome for done in mesh.router.dones] == [OUTCOME_CANCELLED, OUTCOME_OK]
    mesh.plan[:] = [too_old]
    with pytest.raises(grpc.aio.AioRpcError) as none_left:
        await mesh.complete()
    assert none_left.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_dead_worker_address_is_unseen(mesh: Mesh) -> None:
    living = dict(mesh.router.workers)
    mesh.router.workers.clear()
    mesh.router.workers.update({"dead": "127.0.0.1:1", **living})
    try:
        assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    finally:
        mesh.router.workers.clear()
        mesh.router.workers.update(living)


async def test_all_workers_failing_is_an_error(mesh: Mesh) -> None:
    mesh.plan[:] = [Script(fail_before_admission=grpc.StatusCode.UNAVAILABLE)]
    status, error, _ = await mesh.error("Completions", STREAM)
    assert status == grpc.StatusCode.UNAVAILABLE
    assert error["code"] == "model_unavailable"
    assert len(mesh.router.asks) == 3


async def test_a_stale_worker_is_waited_for(mesh: Mesh) -> None:
    mesh.plan[:] = [Script(stale=True)] * 4 + [Script(answer_tokens(mesh))]
    assert (await mesh.complete())["choices"][0]["text"] == ANSWER
    await eventually(lambda: len(mesh.router.dones) == 5)
    assert [done.outcome for done in mesh.router.dones] == [OUTCOME_STALE] * 4 + [OUTCOME_OK]
    await mesh.wait_idle()


async def test_full_workers_are_waited_for_in_turn(mesh: Mesh) -> None:
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED, retry_after_s=3)
    calls: list[asyncio.Task[object]] = []
    for prompt, priority in (("one", "batch"), ("one two", None), ("one two three", "interactive")):
        calls.append(asyncio.create_task(mesh.complete(prompt=prompt, priority=priority)))
        await eventually(lambda: mesh.gateway.core.placement.line.num_waiting == len(calls))
    mesh.router.refusal = None
    await asyncio.gather(*calls)
    assert [ask.prompt_tokens for ask in mesh.router.asks[-3:]] == [3, 2, 1]
    await mesh.wait_idle()


async def test_routers_are_told_what_waits_until_nothing_does(mesh: Mesh) -> None:
    mesh.router.queues.clear()
    assert (await mesh.complete())["choices"]
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED, retry_after_s=3)
    calls = [asyncio.create_task(mesh.complete(prompt=prompt)) for prompt in ("one", "one two three")]

    def reported() -> list[tuple[str, int, int]]:
        models = [model for report in list(mesh.router.queues) for model in report.waiting]
        return [(model.model, model.requests, model.prompt_tokens) for model in models]

    await eventually(lambda: ("smollm2-135m", 2, 4) in reported())
    mesh.router.refusal = None
    await asyncio.gather(*calls)
    await eventually(lambda: not mesh.router.queues[-1].waiting)
    told = len(mesh.router.queues)
    assert (await mesh.complete())["choices"]
    assert len(mesh.router.queues) == told, "silent while nobody waits"


async def test_a_wait_has_an_end(text_model: TextModel) -> None:
    async with running_mesh(text_model, max_wait_s=1.0, max_waiting_requests=2) as mesh:
        mesh.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED, retry_after_s=6.5)
        status, error, trailing = await mesh.error("Completions", STREAM)
        assert (status, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "overloaded")
        assert trailing["retry-after"] == "7", "the router's forecast"
        mesh.router.refusal = None
        mesh.plan[:] = [Script(stale=True)]
        status, error, trailing = await mesh.error("Completions", STREAM)
        assert (status, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "overloaded")
        assert int(trailing["retry-after"]) >= 1
        # Refused, all of them stand in the line until they give up; one that is being placed does not count there.
        mesh.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED, retry_after_s=6.5)
        answers = await asyncio.gather(*(mesh.error("Completions", STREAM) for _ in range(5)))
        assert {answer[0] for answer in answers} == {grpc.StatusCode.UNAVAILABLE}
        assert 1 <= sum("are waiting" in answer[1]["message"] for answer in answers) <= 3
        await mesh.wait_idle()


async def test_workers_refusal_of_bad_input_is_not_retried(mesh: Mesh) -> None:
    mesh.plan[:] = [Script(fail_before_admission=grpc.StatusCode.INVALID_ARGUMENT)]
    status, _, _ = await mesh.error("Completions", STREAM)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert len(mesh.router.asks) == 1


async def test_an_ask_that_no_router_understands_is_our_bug(mesh: Mesh) -> None:
    mesh.router.refusal = Refusal(detail="a prompt without tokens")
    status, error, trailing = await mesh.error("Completions", STREAM)
    assert (status, error["code"]) == (grpc.StatusCode.INTERNAL, "internal_error")
    assert "retry-after" not in trailing


async def test_disconnect_cancels_everything(mesh: Mesh) -> None:
    mesh.say(ANSWER, hang_after=3)
    for fields in ({}, {"prompt": ["a", "b", "c"]}, {"stream": False}):
        calls = [mesh.openai.Completions(body(**fields)) for _ in range(10)]
        await eventually(lambda: sum(w.running for w in mesh.workers) >= 10)
        for call in calls:
            call.cancel()
        await mesh.wait_idle()
    await eventually(lambda: len(mesh.router.dones) == len(mesh.router.asks))
    assert {done.outcome for done in mesh.router.dones} == {OUTCOME_CANCELLED}


async def test_disconnect_while_being_placed(mesh: Mesh) -> None:
    mesh.router.mute = True
    call = mesh.openai.Completions(body())
    await eventually(lambda: mesh.router.asks)
    call.cancel()
    await mesh.wait_idle()


async def test_clients_deadline_is_honoured(mesh: Mesh) -> None:
    mesh.say(ANSWER, hang_after=0)
    call = mesh.openai.Completions(body(stream=False), timeout=2.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC sends a timeout in whole units, rounded up.
    assert 0 < mesh.router.asks[0].deadline_s <= 2.01


async def test_an_error_names_its_request(mesh: Mesh) -> None:
    _, _, trailing = await mesh.error(
        "Completions", {"model": "smollm2-135m", "prompt": ""}, metadata=(("x-request-id", "abc-2"),)
    )
    assert trailing["x-request-id"] == "abc-2"
    _, _, trailing = await mesh.error("Completions", {"model": "unknown", "prompt": "hi"})
    assert trailing["x-request-id"]


async def test_grant_carries_identity_to_the_worker(mesh: Mesh) -> None:
    await mesh.complete()
    request, metadata = mesh.workers[0].requests[0], mesh.workers[0].metadata[0]
    cleared = mesh.gateway.core.generations.of("default", time.monotonic())
    assert request.owner_digest == owner_digest(SECRET.block_key, tenant="default", cleared=cleared)
    assert metadata["x-request-id"] == request.request_id


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict_shared(text_model: TextModel) -> AsyncIterator[Mesh]:
    """A mesh with short limits."""
    async with running_mesh(
        text_model, workers=2, admit_patience_s=0.6, admit_timeout_s=1.5, stall_timeout_s=2.0, heartbeat_s=0.2,
        max_inflight_requests=4, max_tenant_inflight_requests=3, default_deadline_s=30,
    ) as mesh:  # fmt: skip
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def strict(strict_shared: Mesh) -> AsyncIterator[Mesh]:
    """That mesh, reset before and idle after each test."""
    strict_shared.reset()
    yield strict_shared
    await strict_shared.wait_idle()


async def test_silent_worker_is_given_up(strict: Mesh) -> None:
    tokens = answer_tokens(strict)
    strict.plan[:] = [Script(tokens, hang_after=0), Script(tokens)]
    assert (await strict.complete())["choices"][0]["text"] == ANSWER
    strict.plan[:] = [Script(tokens, hang_after=2), Script(tokens)]
    raw = (await strict.post("Completions", STREAM)).decode()
    assert "[DONE]" in raw
    assert '"error"' not in raw
    assert raw.count("\n\n: \n\n") >= 1, "a silent stream is kept open by comments"


async def test_a_prompt_that_gets_on_may_take_longer_than_silence_may_last(strict: Mesh) -> None:
    strict.plan[:] = [Script(answer_tokens(strict), prefill_s=0.5, signs=5), Script([])]
    assert (await strict.complete())["choices"][0]["text"] == ANSWER
    assert len(strict.router.asks) == 1


async def test_the_router_is_asked_again_while_the_worker_says_nothing(strict: Mesh) -> None:
    """Not excluded at first: it may be slow and alone. The router does not name it again once it is suspect."""
    tokens = answer_tokens(strict)
    strict.plan[:] = [Script(mute=True), Script(tokens)]
    assert (await strict.complete())["choices"][0]["text"] == ANSWER
    assert [list(ask.excluded_workers) for ask in strict.router.asks] == [[], []]
    await eventually(lambda: len(strict.router.dones) == 2)
    assert [done.outcome for done in strict.router.dones] == [OUTCOME_CANCELLED, OUTCOME_OK]


async def test_a_worker_that_stays_silent_is_excluded(strict: Mesh) -> None:
    strict.plan[:] = [Script(mute=True), Script(mute=True), Script(answer_tokens(strict))]
    assert (await strict.complete())["choices"][0]["text"] == ANSWER
    assert [list(ask.excluded_workers) for ask in strict.router.asks] == [[], [], ["w0"]]


async def test_limits_of_requests_in_flight(strict: Mesh) -> None:
    may_answer = asyncio.Event()
    strict.say(ANSWER, answer_after=may_answer)
    calls = [strict.openai.Completions(body()) for _ in range(3)]
    for call in calls:
        await call.initial_metadata()
    status, error, trailing = await strict.error("Completions", STREAM)
    assert (status, error["code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
    assert trailing["retry-after"] == "1"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await strict.native.Tokenize(TokenizeRequest(model="smollm2-135m", text="hi"))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    may_answer.set()
    for call in calls:
        assert b"[DONE]" in b"".join([message.data async for message in call])
    assert (await strict.complete())["choices"][0]["text"] == ANSWER


async def test_unknown_tokenizer_is_refused(strict: Mesh) -> None:
    strict.router.set_models(served_model(tokenizer_digest=b"other"), served_model(name="big"))
    await eventually(lambda: not strict.gateway.core.catalog.is_ready)
    for name, part in (("smollm2-135m", "another tokenizer"), ("big", "no tokenizer")):
        status, error, _ = await strict.error("Completions", {**STREAM, "model": name})
        assert (status, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_unavailable")
        assert part in error["message"]
    strict.router.set_models()
    await eventually(lambda: not strict.gateway.core.catalog._reported)
    status, error, _ = await strict.error("Completions", STREAM)
    assert (status, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_unavailable")
    strict.router.set_models(served_model(tokenizer_digest=strict.text.digest))
    await eventually(lambda: strict.gateway.core.catalog.is_ready)
    strict.gateway.core.catalog.update(ModelSnapshot(models=[served_model(ready_replicas=0)]))
    assert not strict.gateway.core.catalog.is_ready
    strict.router.set_models(served_model())
    await eventually(lambda: strict.gateway.core.catalog.is_ready)


async def test_a_gateway_without_a_part_of_itself_ends(text_model: TextModel) -> None:
    async with running_mesh(text_model) as mesh:
        stop = asyncio.Event()
        serving = asyncio.create_task(mesh.gateway.run_until(stop))
        await mesh.gateway.router.close()
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="has ended"):
                await serving
        stop.set()
        with pytest.raises(RuntimeError, match="has ended"):
            await mesh.gateway.run_until(stop)


async def test_drain_finishes_streams_and_refuses_new_ones(strict: Mesh) -> None:
    """The last test of this file: the gateway stays drained."""
    may_answer = asyncio.Event()
    strict.say(ANSWER, answer_after=may_answer)
    call = strict.openai.Completions(body())
    await call.initial_metadata()
    draining = asyncio.create_task(strict.gateway.drain())
    await eventually(lambda: strict.gateway.core.admission.draining)
    status, _, _ = await strict.error("Completions", STREAM)
    assert status == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError):
        await strict.openai.Readyz(Empty())
    assert not draining.done()
    may_answer.set()
    assert b"[DONE]" in b"".join([message.data async for message in call])
    await asyncio.wait_for(draining, 60)
