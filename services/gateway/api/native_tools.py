"""Tools in the native API: what a request offers, calls in messages, and those of an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvmesh.v1.inference_pb2 import (
    ChatMessages,
    GenerateDelta,
    GenerateRequest,
    TokenizeRequest,
    Tool,
    ToolCallDelta,
)

from services.gateway.errors import InvalidRequest
from services.gateway.output import Delta
from services.gateway.tools.call_parser import Arguments, CallBegin, Piece, Text
from services.gateway.tools.choice_calls import ChoiceCalls
from services.gateway.tools.offered import AUTO, NONE, REQUIRED, ToolOffer, ToolText, check_number

_CHAT_ALONE = "tools go with a chat alone"


def tool_offer(request: GenerateRequest) -> ToolOffer | None:
    """None when there is nothing about tools in a request. Raises InvalidRequest."""
    if not request.tools and not request.HasField("tool_choice"):
        return None
    choice, named = _choice(request)
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    offer = ToolOffer(_tools(request.tools), choice, named, parallel)
    if request.tools and choice != NONE:
        _check_beside_tools(request)
    return offer


def told_tools(request: TokenizeRequest) -> ToolOffer | None:
    """Those that the model is told of in a chat. Raises InvalidRequest."""
    if not request.tools:
        return None
    if not request.HasField("chat"):
        raise InvalidRequest(_CHAT_ALONE, "tools")
    return ToolOffer(_tools(request.tools))


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
            told["tool_calls"] = [
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


def _tools(tools: Sequence[Tool]) -> tuple[ToolText, ...]:
    check_number(len(tools))
    return tuple(ToolText(tool.name, tool.description, tool.parameters) for tool in tools)


def _check_beside_tools(request: GenerateRequest) -> None:
    if not request.HasField("chat"):
        raise InvalidRequest(_CHAT_ALONE, "tools")
    if request.HasField("form"):
        raise InvalidRequest("form cannot go with tools unless tool_choice is none", "form")
    if request.HasField("return_text") and not request.return_text:
        raise InvalidRequest("return_text: calls are read in the text", "return_text")
