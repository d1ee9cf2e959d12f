"""Tools of a chat body: which may be called, what the model is told of them, and earlier calls in messages. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.openai_schema import ChatBody, ChatMessageBody, NamedTool, ToolBody
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.request import ToolUse
from services.gateway.tools import offered
from services.gateway.tools.offered import AUTO, NONE, REQUIRED, Offered


def tool_use(body: ChatBody) -> ToolUse | None:
    """None when nothing may be called. Raises InvalidRequest."""
    tools = _offered(body.tools or [])
    choice = body.tool_choice if body.tool_choice is not None else AUTO
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return offered.tool_use(tools, REQUIRED, _named(choice), parallel=parallel)
    if choice not in (NONE, AUTO, REQUIRED):
        raise InvalidRequest("tool_choice must be none, auto, required or a function", "tool_choice")
    return offered.tool_use(tools, choice, None, parallel=parallel)


def told_tools(tools: list[ToolBody]) -> list[dict[str, Any]]:
    """What is known of each tool but for `strict`."""
    return [one.told() for one in _offered(tools)]


def message_calls(message: ChatMessageBody, where: str) -> dict[str, Any]:
    """The fields of a message that are about calls, as domain messages have them. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    if message.role == "tool":
        if not message.tool_call_id:
            raise InvalidRequest("tool_call_id must be given", f"{where}.tool_call_id")
        fields["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise InvalidRequest("only messages of a tool have a tool_call_id", f"{where}.tool_call_id")
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest("only messages of the assistant have tool_calls", f"{where}.tool_calls")
        fields["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return fields


def _offered(tools: list[ToolBody]) -> list[Offered]:
    found = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise UnsupportedParameter(f"a tool of type {tool.type!r} is not supported", f"tools[{i}].type")
        if tool.function is None:
            raise InvalidRequest("function must be given", f"tools[{i}].function")
        function = tool.function
        found.append(Offered(function.name, function.description, function.parameters, f"tools[{i}].function"))
    return found


def _named(choice: NamedTool) -> str:
    if choice.type != "function":
        raise UnsupportedParameter(f"tool_choice of type {choice.type!r} is not supported", "tool_choice")
    if choice.function is None:
        raise InvalidRequest("tool_choice.function must be given", "tool_choice")
    return choice.function.name
