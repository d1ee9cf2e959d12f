"""The native API over real gRPC, with scripted peers."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from kvmesh.v1.common_pb2 import FINISH_REASON_STOP
from kvmesh.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    TokenIds,
    TokenizeRequest,
)

from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "smollm2-135m"


async def generate(mesh: Mesh, request: GenerateRequest) -> list[GenerateResponse]:
    return [message async for message in mesh.native.Generate(request)]


async def test_generate_from_text(mesh: Mesh) -> None:
    mesh.say(ANSWER, cached=3)
    request = GenerateRequest(model=MODEL, text="hi", num_choices=2, stop=["Paris"], request_id="r1", num_logprobs=1)
    got = await generate(mesh, request)
    assert got[0].accepted.request_id == "r1"
    assert got[0].accepted.worker_id == "w0"
    assert got[0].accepted.cached_tokens == 3
    assert got[-1].WhichOneof("event") == "completed"
    for choice in (0, 1):
        deltas = [m.delta for m in got if m.HasField("delta") and m.delta.choice == choice]
        assert "".join(delta.text for delta in deltas) == "The capital of France is "
        assert sum(len(delta.logprobs) for delta in deltas) == sum(len(delta.token_ids) for delta in deltas)
        finishes = [m.finish for m in got if m.HasField("finish") and m.finish.choice == choice]
        assert [(f.reason, f.stop_string) for f in finishes] == [(FINISH_REASON_STOP, "Paris")]


async def test_a_request_id_names_one_request(mesh: Mesh) -> None:
    may_answer = asyncio.Event()
    tokens = mesh.text.encode_text(ANSWER)
    mesh.plan[:] = [Script(tokens, answer_after=may_answer), Script(tokens)]
    request = GenerateRequest(model=MODEL, text="hi", request_id="r2")
    first = mesh.native.Generate(request)
    await first.initial_metadata()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(mesh, request)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    # There is no Redis here to find the first request in, and still no reason to refuse what says that it is a repeat.
    keyed = mesh.native.Generate(request, metadata=(("idempotency-key", "k"),))
    assert [message async for message in keyed][-1].WhichOneof("event") == "completed"
    may_answer.set()
    assert [message async for message in first][-1].WhichOneof("event") == "completed"


async def test_generate_from_tokens_without_text(mesh: Mesh) -> None:
    request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[1, 2, 3]), return_text=False, max_tokens=4)
    got = await generate(mesh, request)
    assert list(mesh.workers[0].requests[0].prompt_token_ids) == [1, 2, 3]
    ids = [token for m in got if m.HasField("delta") for token in m.delta.token_ids]
    assert ids == mesh.text.encode_text(ANSWER)[:4]
    assert not any(m.delta.text for m in got if m.HasField("delta"))


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (GenerateRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, text=""), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, chat=ChatMessages()), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, text="a", num_choices=0), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, text="a", temperature=3), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, token_ids=TokenIds(ids=[50_000])), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, text="a", request_id="ü"), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest(model=MODEL, text="a", priority=9), grpc.StatusCode.INVALID_ARGUMENT),  # type: ignore[arg-type]
        (GenerateRequest(model="none", text="a"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_bad_requests(mesh: Mesh, request_: GenerateRequest, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, request_)
    assert caught.value.code() == code


async def test_tokenize_and_detokenize(mesh: Mesh) -> None:
    ids = (await mesh.native.Tokenize(TokenizeRequest(model=MODEL, text=ANSWER))).token_ids
    assert (await mesh.native.Detokenize(DetokenizeRequest(model=MODEL, token_ids=ids))).text == ANSWER
    chat = ChatMessages(messages=[ChatMessage(role="user", content="hi")])
    templated = (await mesh.native.Tokenize(TokenizeRequest(model=MODEL, chat=chat))).token_ids
    await generate(mesh, GenerateRequest(model=MODEL, chat=chat))
    assert list(mesh.workers[0].requests[0].prompt_token_ids) == list(templated)
    many = list(ids) * 500
    assert (await mesh.native.Detokenize(DetokenizeRequest(model=MODEL, token_ids=many))).text == ANSWER * 500
    for bad in (
        DetokenizeRequest(model=MODEL, token_ids=[60_000]),
        DetokenizeRequest(model=MODEL, token_ids=[*many, 60_000]),
        DetokenizeRequest(model="none"),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.native.Detokenize(bad)
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.native.Tokenize(TokenizeRequest(model=MODEL))


async def test_list_models(mesh: Mesh) -> None:
    models = (await mesh.native.ListModels(ListModelsRequest())).models
    assert [(model.name, model.context_length, model.ready_replicas) for model in models] == [(MODEL, 8192, 1)]
