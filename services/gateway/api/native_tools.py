"""Tools in the native API: what a request offers, calls in messages, and those of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from kvmesh.v1.inference_pb2 import ChatMessages, GenerateDelta, GenerateRequest, Tool, ToolCallDelta

from services.gateway.errors import InvalidRequest
from services.gateway.output import Delta
from services.gateway.request import ToolUse
from services.gateway.tools.call_parser import Arguments, CallBegin, Piece, Text
from services.gateway.tools.choice_calls import TOOL_CALLS, ChoiceCalls
from services.gateway.tools.offered import AUTO, NONE, REQUIRED, Offered, tool_use


def requested_use(request: GenerateRequest) -> ToolUse | None:
    """None when nothing may be called. Raises InvalidRequest."""
    choice, named = _choice(request)
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    use = tool_use(_offered(request.tools), choice, named, parallel=parallel)
    if use is None:
        return None
    if not request.HasField("chat"):
        raise InvalidRequest("tools go with a chat alone", "tools")
    if request.HasField("form"):
        raise InvalidRequest("form cannot go with tools unless tool_choice is none", "form")
    if request.HasField("return_text") and not request.return_text:
        raise InvalidRequest("return_text: calls are read in the text", "return_text")
    return use


def told_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """What the model is told. Raises InvalidRequest for a schema that is no JSON."""
    return [one.told() for one in _offered(tools)]


def chat_messages(chat: ChatMessages) -> list[dict[str, Any]]:
    """Messages as the domain has them. Raises InvalidRequest."""
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(chat.messages):
        told: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            told["name"] = message.name
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidRequest("only messages of the assistant have tool_calls", f"messages[{i}].tool_calls")
            told[TOOL_CALLS] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            if message.role != "tool":
                raise InvalidRequest("only messages of a tool have a tool_call_id", f"messages[{i}].tool_call_id")
            told["tool_call_id"] = message.tool_call_id
        messages.append(told)
    return messages


def call_deltas(delta: Delta, pieces: Sequence[Piece], calls: ChoiceCalls) -> Iterator[GenerateDelta]:
    """One message, or several where text follows a call; the first has the tokens, whatever of their text it shows."""
    message = GenerateDelta(choice=delta.index, token_ids=delta.token_ids, logprobs=delta.logprobs)
    for piece in pieces:
        match piece:
            case Text(text):
                if message.tool_calls:
                    yield message
                    message = GenerateDelta(choice=delta.index)
                message.text += text
            case CallBegin(index, name):
                message.tool_calls.append(ToolCallDelta(index=index, id=calls.call_id(index), name=name))
            case Arguments(index, text):
                message.tool_calls.append(ToolCallDelta(index=index, arguments=text))
    if message.token_ids or message.text or message.tool_calls:
        yield message


def _choice(request: GenerateRequest) -> tuple[str, str | None]:
    """The choice, and the function that is named."""
    choice = request.tool_choice
    kind = choice.WhichOneof("kind")
    if request.HasField("tool_choice") and (kind is None or not getattr(choice, kind)):
        raise InvalidRequest("tool_choice: one of its kinds must be given", "tool_choice")
    match kind:
        case "function":
            return REQUIRED, choice.function
        case "required":
            return REQUIRED, None
        case "none":
            return NONE, None
    return AUTO, None


def _offered(tools: Sequence[Tool]) -> list[Offered]:
    return [
        Offered(tool.name, tool.description or None, _schema(tool.parameters, f"tools[{i}].parameters"), f"tools[{i}]")
        for i, tool in enumerate(tools)
    ]


def _schema(parameters: str, field: str) -> Any:
    if not parameters:
        return None
    try:
        return msgspec.json.decode(parameters)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: the schema is not valid JSON: {error}", field) from None
