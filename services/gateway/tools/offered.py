"""The functions that a request of either API offers: which of them may be called, and what the model is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.errors import InvalidRequest
from services.gateway.request import Function, GenerationRequest, ToolUse
from services.gateway.tools.call_format import NAME
from services.gateway.tools.tool_use import MAX_CALLS, MAX_TOOLS

AUTO, NONE, REQUIRED = "auto", "none", "required"
# OpenAI: a function without parameters has none.
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Offered:
    """One function. parameters: None for none. at: its place in the request, for messages."""

    name: str
    description: str | None
    parameters: Any
    at: str

    def told(self) -> dict[str, Any]:
        """What the model is told of it, in OpenAI's form, which templates expect."""
        described = {} if self.description is None else {"description": self.description}
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}

    def checked(self) -> Function:
        """Raises InvalidRequest."""
        if NAME.fullmatch(self.name) is None:
            raise InvalidRequest("a name has 1 to 64 letters, digits, _ and -", f"{self.at}.name")
        field = f"{self.at}.parameters"
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise InvalidRequest(f"{field}: must be a JSON schema of type object", field)
        return Function(self.name, parameters, field)


class ToolText(msgspec.Struct, frozen=True):
    """One function. description, schema (of its parameters, as JSON): empty for none."""

    name: str
    description: str
    schema: str


class ToolOffer(msgspec.Struct, frozen=True):
    """Functions whose schemas are still to be parsed. choice, named, parallel: see `tool_use`."""

    tools: tuple[ToolText, ...]
    choice: str = AUTO
    named: str | None = None
    parallel: bool = True

    @property
    def size(self) -> int:
        """Characters of all of them."""
        return sum(len(tool.name) + len(tool.description) + len(tool.schema) for tool in self.tools)

    def told(self) -> list[dict[str, Any]]:
        """What the model is told of them. Raises InvalidRequest."""
        offered = _parsed(self.tools)
        _checked(offered)
        return [one.told() for one in offered]


def with_tools(request: GenerationRequest, offer: ToolOffer) -> GenerationRequest:
    """A request that may call what is offered to it; the same where that is nothing. Raises InvalidRequest."""
    offered = _parsed(offer.tools)
    use = tool_use(offered, offer.choice, offer.named, parallel=offer.parallel)
    if use is None:
        return request
    return msgspec.structs.replace(request, form=use, tools=[one.told() for one in offered])


def check_number(num_tools: int) -> None:
    """Raise InvalidRequest for more than MAX_TOOLS."""
    if num_tools > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, not {num_tools}", "tools")


def tool_use(offered: Sequence[Offered], choice: str, named: str | None, *, parallel: bool) -> ToolUse | None:
    """None when nothing may be called. named: the one function to call, whatever the choice. Raises InvalidRequest."""
    functions = _checked(offered)
    if named is not None:
        chosen = [function for function in functions if function.name == named]
        if not chosen:
            raise InvalidRequest("tool_choice: tools has no function of that name", "tool_choice")
        return ToolUse(chosen, must_call=True, most_calls=1)
    if not functions and choice == REQUIRED:
        raise InvalidRequest("tool_choice: there are no tools to call", "tool_choice")
    if not functions or choice == NONE:
        return None
    return ToolUse(functions, must_call=choice == REQUIRED, most_calls=MAX_CALLS if parallel else 1)


def _checked(offered: Sequence[Offered]) -> list[Function]:
    check_number(len(offered))
    functions: list[Function] = []
    for one in offered:
        if any(one.name == function.name for function in functions):
            raise InvalidRequest("two functions have this name", f"{one.at}.name")
        functions.append(one.checked())
    return functions


def _parsed(tools: Sequence[ToolText]) -> list[Offered]:
    return [
        Offered(tool.name, tool.description or None, _schema(tool.schema, f"tools[{i}].parameters"), f"tools[{i}]")
        for i, tool in enumerate(tools)
    ]


def _schema(text: str, field: str) -> Any:
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: the schema is not valid JSON: {error}", field) from None
