"""Functions called by the real model through the official client: unary, streamed, and in a conversation."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.mesh import MODEL
from tests.support.tools import TOOLS, WEATHER, function

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
GET_TIME = {"type": "function", "function": {"name": "get_time"}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """The choice of an answer that comes at once, which has to be what the client makes of the stream."""
    asked: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, "temperature": 0, **options,
    }  # fmt: skip
    choice = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    assert streamed.message.content == choice.message.content
    assert streamed.finish_reason == choice.finish_reason
    assert calls_of(streamed) == calls_of(choice)
    return choice


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def checked(choice: Any) -> list[str]:
    """Names of the calls of an answer that ended by itself, their arguments checked."""
    assert choice.finish_reason == "tool_calls"
    for name, arguments in calls_of(choice):
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return [name for name, _ in calls_of(choice)]


def test_a_required_call(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False)
    assert len(checked(choice)) == 1
    assert choice.message.content is None


def test_a_named_call(client: openai.OpenAI) -> None:
    assert checked(ask(client, tool_choice=GET_TIME)) == ["get_time"]


def test_calls_beside_each_other(client: openai.OpenAI) -> None:
    """The bias against its end has the model call again, for as long as it may."""
    choice = ask(client, tool_choice="required", logit_bias={"2": -100}, max_tokens=100)
    assert choice.finish_reason == "length"
    *whole, _ = calls_of(choice)
    assert whole
    for name, arguments in whole:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_calls_where_the_model_may_also_talk(client: openai.OpenAI) -> None:
    """It calls where it has called before, and talks where it has not."""
    called: list[Any] = []
    for city in ("Rome", "Oslo", "Lima"):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        call = {"id": city, "type": "function", "function": function}
        called.append({"role": "user", "content": f"What is the weather in {city}?"})
        called.append({"role": "assistant", "content": None, "tool_calls": [call]})
    choice = ask(client, messages=[*called, *QUESTION], parallel_tool_calls=False)
    assert checked(choice) == ["get_weather"]
    assert choice.message.content is None
    talk = ask(client, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=20)
    assert talk.message.content
    assert talk.message.tool_calls is None


def test_a_conversation_with_results(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice="required", parallel_tool_calls=False).message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "18 degrees, sunny"}
    second = ask(client, messages=[*QUESTION, first.to_dict(), result], tool_choice="none")
    assert second.message.content


def test_a_schema_that_cannot_be_promised(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, function("f", {"type": "object", "properties": {"a": {"not": {"type": "string"}}}})]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=tools)
    assert caught.value.param == "tools[1].function.parameters"
    assert "#/properties/a" in caught.value.message
