"""Calls as each family of models writes them, whatever the product makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from services.gateway.tools.call_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    QWEN_CODER,
    CallFormat,
)

Calls = Sequence[tuple[str, str]]


def hermes(calls: Calls) -> str:
    """Hermes 2 Pro and 3, Qwen 2.5 and 3."""
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def qwen_coder(calls: Calls) -> str:
    """Qwen 3 Coder. Arguments whose names begin with a t are text."""
    return "\n".join(f"<tool_call>\n<function={n}>\n{_parameters(a)}</function>\n</tool_call>" for n, a in calls)


def _parameters(arguments: str) -> str:
    written = {
        name: value if name.startswith("t") else json.dumps(value, ensure_ascii=False)
        for name, value in json.loads(arguments).items()
    }
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())


def llama3(calls: Calls) -> str:
    """Llama 3.1 and 3.2, without its tag."""
    ((name, arguments),) = calls
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def llama3_tagged(calls: Calls) -> str:
    """The same with its tag, and the type that larger ones put before the name."""
    ((name, arguments),) = calls
    return f'<|python_tag|>{{"type": "function", "name": "{name}", "parameters": {arguments}}}'


def mistral(calls: Calls) -> str:
    """Mistral 7B 0.3."""
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


def mistral_with_ids(calls: Calls) -> str:
    """Mistral Nemo."""
    written = (f'{{"name": "{n}", "arguments": {a}, "id": "a1B2c3D4{i % 10}"}}' for i, (n, a) in enumerate(calls))
    return "[TOOL_CALLS][" + ", ".join(written) + "]"


def mistral_args(calls: Calls) -> str:
    """Devstral and Magistral of the second half of 2025."""
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


def mistral_call_id(calls: Calls) -> str:
    """Mistral Small 3.2."""
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]0aB3{i:05}[ARGS]{a}" for i, (n, a) in enumerate(calls))


Writer = Callable[[Calls], str]
WRITERS: list[tuple[CallFormat, Writer]] = [
    (HERMES, hermes),
    (QWEN_CODER, qwen_coder),
    (LLAMA3, llama3),
    (LLAMA3, llama3_tagged),
    (MISTRAL, mistral),
    (MISTRAL, mistral_with_ids),
    (MISTRAL_ARGS, mistral_args),
    (MISTRAL_CALL_ID, mistral_call_id),
]
