"""Calls in answers over real gRPC, whole and streamed, from scripted workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from services.gateway.tools.call_format import HERMES
from tests.gateway.conftest import Mesh
from tests.gateway.fakes import Script
from tests.gateway.test_openai_service import events
from tests.support.tools import TOOLS, function

MODEL = "smollm2-135m"
PARIS = '{"city": "Pa<tool_call>\\"ris\\" {ü🎉"}'
TAG = HERMES.tag
CALL, NOW = HERMES.text([("get_weather", PARIS)]), HERMES.text([("get_time", "{}")])
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def whole(mesh: Mesh, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer that comes at once, which has to be the one that comes as a stream."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    named = {"metadata": (("x-request-id", "calls"),)}
    choices: list[dict[str, Any]] = json.loads(await mesh.post("ChatCompletions", body, **named))["choices"]
    await mesh.wait_idle()
    *chunks, done = events(await mesh.post("ChatCompletions", {**body, "stream": True}, **named))
    assert done == "[DONE]"
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    for choice, streamed in zip(choices, state.current_completion_snapshot.choices, strict=True):
        assert choice["message"]["content"] == streamed.message.content
        assert choice["finish_reason"] == streamed.finish_reason
        calls = [call.model_dump(include={"id", "type", "function"}) for call in streamed.message.tool_calls or []]
        assert choice["message"].get("tool_calls", []) == [
            {**call, "function": {name: call["function"][name] for name in ("name", "arguments")}} for call in calls
        ]
        logprobs = choice["logprobs"]
        assert (logprobs or {}).get("content") == (
            streamed.logprobs.to_dict()["content"] if streamed.logprobs else None
        )
    return choices


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]


def say_choices(mesh: Mesh, texts: Sequence[str]) -> None:
    mesh.plan[:] = [Script(by_choice=[mesh.text.encode_text(text) for text in texts])]


async def test_an_answer_of_calls(mesh: Mesh) -> None:
    mesh.say(f"Let me see.\n{CALL}\n{NOW}")
    (choice,) = await whole(mesh)
    assert choice["message"]["content"] == "Let me see."
    assert calls_of(choice) == [("get_weather", PARIS), ("get_time", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    ids = {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 2
    assert all(one.startswith("call_") for one in ids)
    mesh.say(CALL)
    (choice,) = await whole(mesh, tool_choice="required")
    assert choice["message"]["content"] is None


async def test_a_stream_gives_arguments_as_they_come(mesh: Mesh) -> None:
    mesh.say(CALL)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "stream": True}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(await mesh.post("ChatCompletions", body))[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[-1] == {}
    begin, *fragments = [call for delta in deltas[1:-1] for call in delta["tool_calls"]]
    assert begin["function"] == {"name": "get_weather", "arguments": ""}
    assert all(set(fragment) == {"index", "function"} for fragment in fragments)
    assert len(fragments) > 3


async def test_text_that_is_like_a_tag_is_text(mesh: Mesh) -> None:
    for text in ("", "plain", "a < b, <tool", f"{TAG} x", "ends\n\n"):
        mesh.say(text)
        (choice,) = await whole(mesh)
        assert choice["message"] == {"role": "assistant", "refusal": None, "content": text}
        assert choice["finish_reason"] == "stop"


async def test_choices_have_calls_of_their_own(mesh: Mesh) -> None:
    say_choices(mesh, [CALL, "No call.", f"{NOW}\n{NOW}"])
    first, second, third = await whole(mesh, n=3)
    assert calls_of(first) == [("get_weather", PARIS)]
    assert second["message"]["content"] == "No call."
    assert calls_of(third) == [("get_time", "{}")] * 2
    ids = [call["id"] for choice in (first, third) for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3


async def test_a_cut_answer_gives_what_was_said(mesh: Mesh) -> None:
    answer = f"So:\n{CALL}"
    mesh.say(answer)
    tokens = mesh.text.encode_text(answer)
    for end in range(1, len(tokens), 2):
        (choice,) = await whole(mesh, max_tokens=end)
        said = mesh.text.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        if "tool_calls" in message:
            ((name, arguments),) = calls_of(choice)
            assert (name, message["content"]) == ("get_weather", "So:")
            assert PARIS.startswith(arguments.rstrip("\ufffd"))
            assert arguments.rstrip("\ufffd") == PARIS or said.rstrip("\ufffd").endswith(arguments.rstrip("\ufffd"))
        else:
            assert message["content"] == said


async def test_a_stop_string_ends_a_call(mesh: Mesh) -> None:
    mesh.say(f"So:\n{CALL}")
    (choice,) = await whole(mesh, stop=["ris"])
    assert calls_of(choice) == [("get_weather", PARIS.partition("ris")[0])]
    assert choice["finish_reason"] == "stop"
    (choice,) = await whole(mesh, stop=["_weather"])
    assert choice["message"]["content"] == f'So:\n{TAG}\n{{"name": "get'


async def test_log_probabilities_are_of_every_token(mesh: Mesh) -> None:
    mesh.say(f"So:\n{CALL}")
    (choice,) = await whole(mesh, logprobs=True)
    said = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert said.decode() == f"So:\n{CALL}"


async def test_workers_get_the_grammar_and_the_prompt(mesh: Mesh) -> None:
    mesh.say(NOW)
    await whole(mesh, tool_choice={"type": "function", "function": {"name": "get_time"}})
    request = next(request for worker in mesh.workers for request in worker.requests)
    grammar = json.loads(request.sampling.grammar)["grammars"][0]["lark_grammar"]
    assert "get_time" in grammar
    assert "get_weather" not in grammar
    assert '"get_weather"' in mesh.text.tokenizer.decode(list(request.prompt_token_ids))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "not": {}}}}, "#/properties/a"),
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "#/properties/a"),
    ],
)
async def test_a_schema_that_cannot_be_held_to_reaches_nobody(mesh: Mesh, schema: Any, place: str) -> None:
    tools = [*TOOLS, function("f", schema)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    status, error, _ = await mesh.error("ChatCompletions", body)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert error["param"] == "tools[2].function.parameters"
    assert place in error["message"]
    assert mesh.router.asks == []
