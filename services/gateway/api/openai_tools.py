"""Tools of a chat body: which may be called, what the model is told of them, and earlier calls in messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.api.openai_schema import ChatBody, ChatMessageBody, NamedTool, ToolBody
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.tools.call_format import NAME
from services.gateway.tools.tool_use import MAX_CALLS, MAX_TOOLS, Function, ToolUse

# OpenAI: a function without parameters has none.
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def tool_use(body: ChatBody) -> ToolUse | None:
    """None when nothing may be called. Raises InvalidRequest."""
    functions = _functions(body.tools or [])
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    if isinstance(choice, NamedTool):
        named = [function for function in functions if function.name == _named(choice)]
        if not named:
            raise InvalidRequest("tool_choice: tools has no function of that name", "tool_choice")
        return ToolUse(named, must_call=True, most_calls=1)
    if choice not in ("none", "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required or a function", "tool_choice")
    if not functions:
        if choice == "required":
            raise InvalidRequest("tool_choice: there are no tools to call", "tool_choice")
        return None
    if choice == "none":
        return None
    most_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
    return ToolUse(functions, must_call=choice == "required", most_calls=most_calls)


def told_tools(tools: list[ToolBody]) -> list[dict[str, Any]]:
    """What is known of each tool but for `strict`, in the API's own form, as templates expect it."""
    told = []
    for tool in tools:
        assert tool.function is not None
        given = msgspec.structs.asdict(tool.function)
        kept = {name: value for name, value in given.items() if value is not None and name != "strict"}
        told.append({"type": "function", "function": {**kept, "parameters": kept.get("parameters", _NO_PARAMETERS)}})
    return told


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


def _functions(tools: list[ToolBody]) -> list[Function]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, not {len(tools)}", "tools")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest("two functions have this name", f"tools[{i}].function.name")
    return functions


def _function(tool: ToolBody, where: str) -> Function:
    if tool.type != "function":
        raise UnsupportedParameter(f"a tool of type {tool.type!r} is not supported", f"{where}.type")
    if tool.function is None:
        raise InvalidRequest("function must be given", f"{where}.function")
    if NAME.fullmatch(tool.function.name) is None:
        raise InvalidRequest("a name has 1 to 64 letters, digits, _ and -", f"{where}.function.name")
    field = f"{where}.function.parameters"
    parameters = _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{field}: must be a JSON schema of type object", field)
    return Function(tool.function.name, parameters, field)


def _named(choice: NamedTool) -> str:
    if choice.type != "function":
        raise UnsupportedParameter(f"tool_choice of type {choice.type!r} is not supported", "tool_choice")
    if choice.function is None:
        raise InvalidRequest("tool_choice.function must be given", "tool_choice")
    return choice.function.name
