"""What a chat template is given of tools: its own variables where it knows them, else text that any template renders.

A template knows tools when it reads `tools` and has calls written as `call_format` does; Hermes and Qwen are such.
Others, which may know none or write calls in another way, get the functions in the system message, the calls of
earlier answers as these were written, and results in messages of the user. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from services.gateway.tools.call_format import TAG, call_text

Message = Mapping[str, Any]
# Qwen's coders have calls between the same tags, yet not as JSON.
_OTHER_FORMATS = ("<function=", "<arg_key>")
# Small models answer in whichever of the tags they have read last.
_INTRODUCTION = """\
You can call functions. These are they, as JSON, one a line:
<tools>
{tools}
</tools>
The results of your calls will be given to you between <tool_response> and </tool_response>. To call a function, \
answer with its name and its arguments as JSON between <tool_call> and </tool_call>, one such block for each call:
<tool_call>
{{"name": <function-name>, "arguments": <arguments as a JSON object>}}
</tool_call>\
"""


def knows_tools(source: str, environment: jinja2.Environment) -> bool:
    """Whether a template has a place for tools, and calls in the format that answers have. Raises TemplateError."""
    if TAG not in source or any(other in source for other in _OTHER_FORMATS):
        return False
    return "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))


def with_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates that know tools expect them: the arguments of calls are objects, where they are JSON."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat for a template that knows no tools. Results that follow each other are one message."""
    chat: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and follows_result:
            chat[-1]["content"] += f"\n{_result(message)}"
        elif is_result:
            chat.append({"role": "user", "content": _result(message)})
        else:
            chat.append(_without_calls(message))
        follows_result = is_result
    if not tools:
        return chat
    introduction = _introduction(tools)
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{introduction}"}, *chat[1:]]
    return [{"role": "system", "content": introduction}, *chat]


def _introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(tools=lines)


def _result(message: Message) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _without_calls(message: Message) -> dict[str, Any]:
    calls = [
        call_text(call["function"]["name"], call["function"]["arguments"] or "{}")
        for call in message.get("tool_calls", ())
    ]
    content = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:  # of an answer that was cut
        arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
