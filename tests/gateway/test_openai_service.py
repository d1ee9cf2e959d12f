"""The OpenAI service over real gRPC, with scripted peers."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1 import router_pb2
from kvmesh.v1.openai_pb2 import GetModelRequest
from kvmesh.v1.router_pb2 import OUTCOME_OK

from tests.gateway.conftest import ANSWER, Mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


def events(raw: bytes) -> list[Any]:
    """Data of all events of a stream; comments are skipped."""
    assert raw.endswith(b"\n\n")
    blocks = [block for block in raw.decode().split("\n\n") if block.startswith("data: ")]
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


async def test_chat_answers_with_text_usage_and_headers(mesh: Mesh) -> None:
    mesh.say(ANSWER, cached=16)
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    request = HttpBody(data=json.dumps(body).encode())
    call = mesh.openai.ChatCompletions(request, metadata=(("x-request-id", "abc-1"),))
    message = await call.read()
    reply = json.loads(message.data)
    assert message.content_type == "application/json"
    assert reply["id"] == "chatcmpl-abc-1"
    assert reply["object"] == "chat.completion"
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    sent = mesh.workers[0].requests[0]
    tokens = len(mesh.text.encode_text(ANSWER))
    assert reply["usage"] == {
        "prompt_tokens": len(sent.prompt_token_ids),
        "completion_tokens": tokens,
        "total_tokens": len(sent.prompt_token_ids) + tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    headers = dict(await call.initial_metadata())
    assert headers["x-request-id"] == "abc-1"
    assert headers["x-kvmesh-worker"] == "w0"
    assert headers["x-kvmesh-cached-tokens"] == "16"
    assert len(headers["traceparent"].split("-")) == 4
    assert mesh.workers[0].metadata[0]["traceparent"] == headers["traceparent"]
    await eventually(lambda: len(mesh.router.dones) == 1)
    done = mesh.router.dones[0]
    assert (done.request_id, done.attempt, done.outcome, done.output_tokens) == ("abc-1", 1, OUTCOME_OK, tokens)
    assert done.ttft_s > 0
    assert done.cached.local == 16


async def test_a_callers_trace_goes_on(mesh: Mesh) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"model": "smollm2-135m", "prompt": "hi"}
    await mesh.post("Completions", body, metadata=(("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),))
    assert trace_id in mesh.workers[0].metadata[0]["traceparent"]
    assert trace_id in mesh.router.asks[0].traceparent


async def test_chat_prompt_is_the_models_template(mesh: Mesh) -> None:
    await mesh.chat("What is 12?")
    prompt = mesh.text.tokenizer.decode(list(mesh.workers[0].requests[0].prompt_token_ids), skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_stream_is_the_contract(mesh: Mesh) -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    got = events(await mesh.post("ChatCompletions", {**body, "stream_options": {"include_usage": True}}))
    assert got[-1] == "[DONE]"
    *chunks, usage = got[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    unasked = events(await mesh.post("ChatCompletions", body))
    assert all("usage" not in chunk for chunk in unasked[:-1])
    assert unasked[-2]["choices"] != []


async def test_completion_stream(mesh: Mesh) -> None:
    raw = await mesh.post("Completions", {"model": "smollm2-135m", "prompt": "Hi", "stream": True, "echo": True})
    got = events(raw)
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "Hi" + ANSWER
    assert {chunk["object"] for chunk in got[:-1]} == {"text_completion"}


async def test_headers_leave_when_a_worker_has_admitted(mesh: Mesh) -> None:
    mesh.say(ANSWER, hang_after=0)
    for path, body in (
        ("ChatCompletions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("Completions", {"prompt": "hi"}),
    ):
        raw = json.dumps({"model": "smollm2-135m", "stream": True, **body}).encode()
        call = getattr(mesh.openai, path)(HttpBody(data=raw), timeout=30)
        assert dict(await call.initial_metadata())["x-kvmesh-worker"] == "w0"
        assert (await call.read()).content_type == "text/event-stream"
        call.cancel()


async def test_stop_string_spanning_tokens_cuts_text_and_work(mesh: Mesh) -> None:
    mesh.say("one two three four five", pause_s=0.01)
    reply = await mesh.chat(stop=["ee fo"])
    assert reply["choices"][0]["message"]["content"] == "one two thr"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == len(mesh.text.encode_text("one two three fo"))
    await eventually(lambda: len(mesh.router.dones) == 1)
    assert mesh.router.dones[0].outcome == OUTCOME_OK


async def test_stop_token_has_no_text(mesh: Mesh) -> None:
    tokens = mesh.text.encode_text("one two")
    mesh.say("one two")
    reply = await mesh.chat(stop_token_ids=[tokens[-1]])
    assert reply["choices"][0]["message"]["content"] == "one"
    assert tokens[-1] in mesh.workers[0].requests[0].stop_token_ids
    assert 2 in mesh.workers[0].requests[0].stop_token_ids
    await mesh.chat(ignore_eos=True)
    assert list(mesh.workers[0].requests[1].stop_token_ids) == []


async def test_length_finish(mesh: Mesh) -> None:
    reply = await mesh.chat(max_tokens=2)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2


async def test_choices_and_prompt_lists_have_their_index(mesh: Mesh) -> None:
    tokens = [mesh.text.encode_text("one"), mesh.text.encode_text("two words")]
    reply = await mesh.complete(tokens, n=2, echo=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].removesuffix(ANSWER) for choice in reply["choices"]] == [
        "one",
        "one",
        "two words",
        "two words",
    ]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert reply["usage"]["completion_tokens"] == 4 * len(mesh.text.encode_text(ANSWER))
    assert {request.num_choices for request in mesh.workers[0].requests} == {2}


async def test_many_prompts_with_stop_strings_end(mesh: Mesh) -> None:
    mesh.say("one two three four", pause_s=0.005)
    reply = await mesh.complete([f"prompt {i}" for i in range(40)], stop="three")
    assert [choice["text"] for choice in reply["choices"]] == ["one two "] * 40


async def test_logprobs_in_both_formats(mesh: Mesh) -> None:
    mesh.say("née two")
    tokens = mesh.text.encode_text("née two")
    chat = (await mesh.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert len(chat) == len(tokens)
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == "née two"
    assert [len(entry["top_logprobs"]) for entry in chat] == [2] * len(tokens)
    assert chat[0]["top_logprobs"][0]["logprob"] == -9999.0
    plain = (await mesh.complete(logprobs=1))["choices"][0]["logprobs"]
    assert {len(values) for values in plain.values()} == {len(tokens)}
    text = "née two"
    for token, offset in zip(plain["tokens"], plain["text_offset"], strict=True):
        assert "\ufffd" in token or text[offset : offset + len(token)] == token
    bare = (await mesh.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []


async def test_streamed_logprobs_are_all_there(mesh: Mesh) -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True}
    got = events(await mesh.post("ChatCompletions", body))
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in got[:-1]]
    entries = [entry for value in logprobs if value for entry in value["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == ANSWER


async def test_sampling_reaches_the_worker(mesh: Mesh) -> None:
    await mesh.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, logit_bias={"5": -100}, max_completion_tokens=9, priority="batch",
    )  # fmt: skip
    request = mesh.workers[0].requests[0]
    sampling = request.sampling
    assert sampling.temperature == pytest.approx(0.5)
    assert (sampling.top_k, sampling.seed) == (7, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert (request.max_tokens, request.priority) == (9, 3)
    await mesh.chat()
    await mesh.chat()
    seeds = {request.sampling.seed for request in mesh.workers[0].requests[1:]}
    assert len(seeds) == 2


async def test_cache_salt_changes_block_ids(mesh: Mesh) -> None:
    for salt in (None, "a", "b", "a"):
        await mesh.chat("a long enough prompt " * 8, cache_salt=salt)
    ids = [request.prompt_block_ids for request in mesh.workers[0].requests]
    assert ids[1] == ids[3]
    assert len(set(ids)) == 3
    assert len(ids[0]) == len(mesh.workers[0].requests[0].prompt_token_ids) // 16 * 16
    assert mesh.router.asks[0].block_ids == ids[0]


async def test_models(mesh: Mesh) -> None:
    listed = json.loads((await mesh.openai.ListModels(Empty())).data)
    one = json.loads((await mesh.openai.GetModel(GetModelRequest(id="smollm2-135m"))).data)
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["kvmesh"]["context_length"]) == ("smollm2-135m", "model", 8192)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.openai.GetModel(GetModelRequest(id="no/such"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert json.loads((await mesh.openai.Healthz(Empty())).data) == {"status": "alive"}
    assert json.loads((await mesh.openai.Readyz(Empty())).data) == {"status": "ready"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "gpt-5"}, "model_not_found", "model"),
        ({"max_tokens": 10**9}, "context_length_exceeded", "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "word " * 200_000}]}, "context_length_exceeded", "messages"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"max_tokens": -1}, None, "max_tokens"),
        ({"messages": []}, None, "messages"),
        ({"tools": [{"type": "custom"}]}, "unsupported_parameter", "tools[0].type"),
    ],
)
async def test_bad_requests(mesh: Mesh, fields: dict[str, Any], code: str | None, param: str) -> None:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    status, error, trailing = await mesh.error("ChatCompletions", body)
    not_found = code == "model_not_found"
    assert status == (grpc.StatusCode.NOT_FOUND if not_found else grpc.StatusCode.INVALID_ARGUMENT)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert "retry-after" not in trailing
    assert mesh.workers[0].requests == []


async def test_refusals_carry_retry_after(mesh: Mesh) -> None:
    for reason, code in (
        (router_pb2.REFUSAL_REASON_NO_WORKER, "model_unavailable"),
        (router_pb2.REFUSAL_REASON_DEADLINE, "objective_unmet"),
    ):
        mesh.router.refusal = router_pb2.Refusal(reason=reason, detail="full", retry_after_s=2.5)
        status, error, trailing = await mesh.error("Completions", {"model": "smollm2-135m", "prompt": "hi"})
        assert status == grpc.StatusCode.UNAVAILABLE
        assert (error["code"], error["type"]) == (code, "server_error")
        assert trailing["retry-after"] == "3"


async def test_request_ids_in_flight_are_unique(mesh: Mesh) -> None:
    mesh.say(ANSWER, pause_s=0.02)
    body = {"model": "smollm2-135m", "prompt": "hi", "stream": True}
    calls = [
        mesh.openai.Completions(HttpBody(data=json.dumps(body).encode()), metadata=(("x-request-id", "same"),))
        for _ in range(3)
    ]
    ids = {dict(await call.initial_metadata())["x-request-id"] for call in calls}
    assert len(ids) == 3
    for call in calls:
        assert events(b"".join([message.data async for message in call]))[-1] == "[DONE]"
