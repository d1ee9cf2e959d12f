"""Tools in the native API over real gRPC, with scripted workers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import grpc
import pytest
from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_TOOL_CALLS
from kvmesh.v1.inference_pb2 import (
    AnswerForm,
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
)

from services.gateway.tools.call_format import HERMES
from tests.gateway.conftest import Mesh
from tests.support.tools import TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "smollm2-135m"
PARIS = '{"city": "Pa<tool_call>\\"ris\\" {ü🎉"}'
CALL, NOW = HERMES.text([("get_weather", PARIS)]), HERMES.text([("get_time", "{}")])
OFFERED = [
    Tool(
        name=tool["function"]["name"],
        description=tool["function"]["description"],
        parameters=json.dumps(tool["function"]["parameters"]),
    )
    for tool in TOOLS
]
HI = ChatMessages(messages=[ChatMessage(role="user", content="hi")])


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": MODEL, "chat": HI, "tools": OFFERED, **fields})


def nested(depth: int) -> str:
    """A schema of lists of lists."""
    lists = '{"items": ' * depth + "{}" + "}" * depth
    return f'{{"properties": {{"a": {lists}}}}}'


async def answer(mesh: Mesh, **fields: Any) -> tuple[str, list[list[str]], int, list[int]]:
    """Text, calls (id, name, arguments), finish reason and tokens of an answer of one choice."""
    text, calls, reason, tokens = "", [], 0, []
    async for message in mesh.native.Generate(asked(**fields)):
        assert not reason or message.HasField("completed")
        reason = message.finish.reason or reason
        delta = message.delta
        tokens += delta.token_ids
        assert not (delta.text and calls)
        text += delta.text
        for part in delta.tool_calls:
            if part.id:
                assert part.index == len(calls)
                calls.append([part.id, part.name, ""])
            calls[part.index][2] += part.arguments
    return text, calls, reason, tokens


async def test_calls_are_told_beside_text_and_tokens(mesh: Mesh) -> None:
    said = f"Let me see.\n{CALL}\n{NOW}"
    mesh.say(said)
    text, calls, reason, tokens = await answer(mesh)
    assert text == "Let me see."
    assert [call[1:] for call in calls] == [["get_weather", PARIS], ["get_time", "{}"]]
    assert len({call[0] for call in calls}) == 2
    assert reason == FINISH_REASON_TOOL_CALLS
    assert tokens == mesh.text.encode_text(said)


async def test_arguments_come_as_they_are_drawn(mesh: Mesh) -> None:
    mesh.say(CALL)
    parts = [
        part async for message in mesh.native.Generate(asked()) for part in message.delta.tool_calls if not part.id
    ]
    assert len(parts) > 3
    assert "".join(part.arguments for part in parts) == PARIS


@pytest.mark.parametrize("text", ["", "plain", "a < b, <tool", "<tool_call> x", "ends\n\n"])
async def test_text_that_is_like_a_call_is_text(mesh: Mesh, text: str) -> None:
    mesh.say(text)
    assert (await answer(mesh))[:3] == (text, [], FINISH_REASON_STOP)


async def test_a_cut_answer_gives_what_was_said(mesh: Mesh) -> None:
    mesh.say(f"So:\n{CALL}")
    tokens = mesh.text.encode_text(f"So:\n{CALL}")
    before = f"So:\n{CALL}".index(PARIS)
    for end in range(1, len(tokens), 4):
        text, calls, reason, _ = await answer(mesh, max_tokens=end)
        assert reason == FINISH_REASON_LENGTH
        cut = mesh.text.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        if calls:
            assert (text, calls[0][1]) == ("So:", "get_weather")
            assert calls[0][2].rstrip("\ufffd") == cut[before : before + len(PARIS)].rstrip("\ufffd")
        else:
            assert text == cut


async def test_workers_get_the_grammar_and_the_same_prompt_as_from_the_other_api(mesh: Mesh) -> None:
    mesh.say(NOW)
    calls = [ToolCall(id="c", name="get_time", arguments="{}")]
    messages = [
        *HI.messages,
        ChatMessage(role="assistant", tool_calls=calls),
        ChatMessage(role="tool", tool_call_id="c", content="noon"),
    ]
    await answer(mesh, chat=ChatMessages(messages=messages), tool_choice=ToolChoice(function="get_time"))
    function = {"name": "get_time", "arguments": "{}"}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    choice = {"type": "function", "function": {"name": "get_time"}}
    body = {"model": MODEL, "messages": chat, "tools": TOOLS, "tool_choice": choice}
    await mesh.post("ChatCompletions", body)
    native, openai = [request for worker in mesh.workers for request in worker.requests]
    assert native.sampling.grammar == openai.sampling.grammar
    assert native.prompt_token_ids == openai.prompt_token_ids
    tokenize = TokenizeRequest(model=MODEL, chat=ChatMessages(messages=messages), tools=OFFERED)
    assert (await mesh.native.Tokenize(tokenize)).token_ids == native.prompt_token_ids


@pytest.mark.parametrize(
    "schema",
    ['{"properties": {"a": {"type": "integer", "maximum": 18446744073709551616}}}', *map(nested, (100, 495, 900))],
    ids=["number", "100", "495", "900"],
)
async def test_schemas_of_any_size_are_served_or_refused(mesh: Mesh, schema: str) -> None:
    mesh.say(NOW)
    call = mesh.native.Generate(asked(tools=[*OFFERED, Tool(name="f", parameters=schema)]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"text": "hi", "tools": OFFERED}, "chat"),
        ({"chat": HI, "tools": [Tool(name="a b")]}, "1 to 64 letters"),
        ({"chat": HI, "tools": [*OFFERED, *OFFERED]}, "two functions"),
        ({"chat": HI, "tools": [Tool(name="f", parameters="{")]}, "tools[0].parameters"),
        ({"chat": HI, "tools": [Tool(name="f", parameters="[]")]}, "tools[0].parameters"),
    ],
)
async def test_tools_that_cannot_be_counted_are_refused(mesh: Mesh, fields: dict[str, Any], part: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.native.Tokenize(TokenizeRequest(model=MODEL, **fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert part in (caught.value.details() or "")


async def test_without_a_call_to_make_answers_are_free(mesh: Mesh) -> None:
    mesh.say(NOW)
    assert (await answer(mesh, tool_choice=ToolChoice(none=True)))[:2] == (NOW, [])
    (request,) = [request for worker in mesh.workers for request in worker.requests]
    assert not request.sampling.grammar
    assert "get_time" not in mesh.text.tokenizer.decode(list(request.prompt_token_ids))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tools": [Tool(name="a b")]}, "1 to 64 letters"),
        ({"tools": [Tool(name="f", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [Tool(name="f", parameters='{"type": "string"}')]}, "tools[0].parameters"),
        ({"tools": [Tool(name="f"), Tool(name="f")]}, "two functions"),
        ({"tools": [Tool(name=f"f{i}") for i in range(129)]}, "at most 128 tools"),
        ({"tool_choice": ToolChoice(function="no")}, "no function of that name"),
        ({"tool_choice": ToolChoice()}, "tool_choice"),
        ({"tools": [], "tool_choice": ToolChoice(required=True)}, "no tools to call"),
        ({"chat": None, "text": "hi"}, "chat"),
        ({"form": AnswerForm(json_object=True)}, "form"),
        ({"return_text": False}, "return_text"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"chat": ChatMessages(messages=[ChatMessage(role="user", tool_calls=[ToolCall()])])}, "assistant"),
        ({"chat": ChatMessages(messages=[ChatMessage(role="user", tool_call_id="x")])}, "tool_call_id"),
        ({"tools": [Tool(name="f", parameters='{"properties": {"a": {"not": {}}}}')]}, "tools[0].parameters"),
    ],
)
async def test_what_is_wrong_is_refused(mesh: Mesh, fields: dict[str, Any], part: str) -> None:
    given = {name: value for name, value in {"chat": HI, "tools": OFFERED, **fields}.items() if value is not None}
    call = mesh.native.Generate(GenerateRequest(model=MODEL, **given))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert part in (caught.value.details() or "")
    assert mesh.router.asks == []
