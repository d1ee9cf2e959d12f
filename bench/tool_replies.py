"""Answers of a chat with tools through the official client, at once and streamed, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai

CHOICES = ("auto", "required", "named")


@dataclass(frozen=True, slots=True)
class Reply:
    """calls: names and arguments as they were told. refusal: the message of a 400, whose param is `param`."""

    content: str | None = None
    finish: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    refusal: str = ""
    param: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one request, asked twice. faults: what is wrong with the answer. differing: the stream makes another one."""

    choice: str
    reply: Reply
    faults: tuple[str, ...] = ()
    differing: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended for its length, so that its last call need not be whole."""
        return self.reply.finish == "length"


def ask_both(client: openai.OpenAI, choice: str, **asked: Any) -> Verdict:
    """choice: one of CHOICES; named is the first of the tools. asked: further fields of the request.

    Raises openai.APIError for everything but a 400.
    """
    tools: Sequence[Mapping[str, Any]] = asked["tools"]
    first = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    asked |= {"tool_choice": first if choice == "named" else choice}
    reply, streamed = _at_once(client, asked), _streamed(client, asked)
    return Verdict(choice, reply, tuple(faults(reply, choice, tools)), streamed != reply)


def faults(reply: Reply, choice: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an answer is not as it must be: calls that parse, of functions that are there, with arguments of theirs."""
    if reply.refusal:
        return []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    allowed = dict(list(schemas.items())[:1]) if choice == "named" else schemas
    whole = reply.calls[:-1] if reply.finish == "length" else reply.calls
    found = [fault for name, arguments in whole if (fault := _fault_of_call(name, arguments, allowed))]
    if reply.finish not in ("length", "tool_calls" if reply.calls else "stop"):
        found.append(f"finish reason {reply.finish} with {len(reply.calls)} calls")
    if choice != "auto" and reply.finish != "length" and not reply.calls:
        found.append("no call")
    # Of an answer that is cut, a call that has not come to its arguments is text.
    if choice != "auto" and reply.finish != "length" and reply.content:
        found.append("text where only calls may be")
    if choice == "named" and len(reply.calls) > 1:
        found.append("several calls of a named function")
    return found


def answered(verdict: Verdict, prefix: str) -> Iterator[dict[str, Any]]:
    """An answer as history: the message of the assistant, and a result of each of its calls."""
    calls = [
        {"id": f"{prefix}-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(verdict.reply.calls)
    ]
    yield {"role": "assistant", "content": verdict.reply.content, **({"tool_calls": calls} if calls else {})}
    for call in calls:
        yield {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"done": True})}


def _fault_of_call(name: str, arguments: str, schemas: Mapping[str, Any]) -> str:
    if name not in schemas:
        return "a function that may not be called"
    try:
        given = json.loads(arguments)
        jsonschema.validate(given, schemas[name])
    except ValueError:
        return "arguments that are no JSON"
    except jsonschema.ValidationError as error:
        return f"arguments: {error.validator}"
    named = schemas[name].get("properties", {}).keys()
    return "" if given.keys() <= named else "arguments that no parameter has the name of"


def _at_once(client: openai.OpenAI, asked: Mapping[str, Any]) -> Reply:
    try:
        return _reply(client.chat.completions.create(**asked).choices[0])
    except openai.BadRequestError as error:
        return _refused(error)


def _streamed(client: openai.OpenAI, asked: Mapping[str, Any]) -> Reply:
    """By the client's own helper, which puts the deltas together."""
    try:
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            return _reply(stream.current_completion_snapshot.choices[0])
    except openai.BadRequestError as error:
        return _refused(error)


def _reply(choice: Any) -> Reply:
    calls = tuple((call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
    return Reply(choice.message.content, choice.finish_reason, calls)


def _refused(error: openai.BadRequestError) -> Reply:
    return Reply(refusal=error.message, param=error.param or "")
