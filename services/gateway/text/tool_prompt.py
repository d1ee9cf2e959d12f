"""What a chat template is given of tools: its own variables where it knows them, else text that any template renders.

A template knows tools when it reads `tools` and has calls in one of the formats of `call_format`, or when the format is
set for its model. Others, which may know none or write calls in another way, get the functions in the system message,
the calls of earlier answers as these were written, and results in messages of the user. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2
import jinja2.meta

from services.gateway.tools.call_format import (
    FORMATS,
    GENERIC,
    HERMES,
    CallFormat,
    format_of_template,
    short_id,
)
from services.gateway.tools.parameters import whole_arguments

Message = Mapping[str, Any]
# Small models answer in whichever of the tags they have read last.
_FUNCTIONS = """\
You can call functions. These are they, as JSON, one a line:
<tools>
{tools}
</tools>
The results of your calls will be given to you between <tool_response> and </tool_response>. To call a function, \
"""
_BETWEEN_TAGS = """\
answer with its name and its arguments as JSON between <tool_call> and </tool_call>, one such block for each call:
"""
_ALONE = """\
answer with its name and its arguments as JSON, written like this and with nothing else:
"""
_PARAMETERS = '{"<parameter-name>": "<value, as JSON unless it is text>"}'


@dataclass(frozen=True, slots=True)
class Calls:
    """The format of calls. is_native: the template has a place for tools. is_unknown: it has, for calls not known."""

    format: CallFormat
    is_native: bool
    is_unknown: bool = False


def calls_of(source: str, environment: jinja2.Environment, setting: str | None) -> Calls:
    """setting: the name of a format, GENERIC, or None to go by the template. Raises TemplateError."""
    reads_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
    if setting == GENERIC:
        return Calls(HERMES, is_native=False)
    if setting is not None:
        return Calls(FORMATS[setting], is_native=reads_tools)
    found = format_of_template(source) if reads_tools else None
    return Calls(found or HERMES, is_native=found is not None, is_unknown=reads_tools and found is None)


def with_objects(messages: Sequence[Message], call_format: CallFormat) -> list[dict[str, Any]]:
    """Messages as templates that know tools expect them: the arguments of calls are objects, where they are JSON.

    Templates of a format that has parameters take nothing but objects: of arguments that were cut, what is whole.
    """
    chat = list(_single_calls(messages)) if call_format.is_single else messages
    return [_for_template(message, call_format) for message in chat]


def as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[dict[str, Any]]:
    """The chat for a template that knows no tools. Results that follow each other are one message."""
    chat: list[dict[str, Any]] = []
    follows_result = False
    for message in _single_calls(messages) if call_format.is_single else messages:
        is_result = message["role"] == "tool"
        if is_result and follows_result:
            chat[-1]["content"] += f"\n{_result(message)}"
        elif is_result:
            chat.append({"role": "user", "content": _result(message)})
        else:
            chat.append(_without_calls(message, call_format))
        follows_result = is_result
    if not tools:
        return chat
    introduction = _introduction(tools, call_format)
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{introduction}"}, *chat[1:]]
    return [{"role": "system", "content": introduction}, *chat]


def _introduction(tools: Sequence[Mapping[str, Any]], call_format: CallFormat) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = _BETWEEN_TAGS if call_format is HERMES else _ALONE
    arguments = _PARAMETERS if call_format.has_parameters else "<arguments as a JSON object>"
    example = call_format.text([("<function-name>", arguments)])
    if call_format is HERMES:
        example = example.replace('"<function-name>"', "<function-name>")
    return _FUNCTIONS.format(tools=lines) + how + example


def _result(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _without_calls(message: Message, call_format: CallFormat) -> dict[str, Any]:
    called = [call["function"] for call in message.get("tool_calls", ())]
    calls = call_format.text(
        [(one["name"], one["arguments"] or "{}") for one in called], after_text=bool(message["content"])
    )
    content = "\n".join(part for part in (message["content"], calls) if part)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Several calls of one message become messages of one call, each before its results."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda one: one["role"] == "tool", messages[position:]))
        position += len(results)
        for number, call in enumerate(calls):
            yield {**message, "tool_calls": [call], "content": "" if number else message["content"]}
            yield from (one for one in results if one.get("tool_call_id") == call["id"])
            results = [one for one in results if one.get("tool_call_id") != call["id"]]
        yield from results


def _for_template(message: Message, call_format: CallFormat) -> dict[str, Any]:
    given = dict(message)
    if "tool_calls" in given:
        given["tool_calls"] = [_with_object(call, call_format) for call in given["tool_calls"]]
    if "tool_call_id" in given and call_format.has_short_ids:
        given["tool_call_id"] = short_id(given["tool_call_id"])
    return given


def _with_object(call: Mapping[str, Any], call_format: CallFormat) -> dict[str, Any]:
    function = call["function"]
    named = {"id": short_id(call["id"])} if call_format.has_short_ids else {}
    return {**call, **named, "function": {**function, "arguments": _object(function["arguments"] or "{}", call_format)}}


def _object(arguments: str, call_format: CallFormat) -> Any:
    if call_format.has_parameters:
        return whole_arguments(arguments)
    try:
        return json.loads(arguments)
    except ValueError:  # of an answer that was cut
        return arguments
