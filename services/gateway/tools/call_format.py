"""How a call is written in an answer: the format of Hermes and Qwen, which the generic prompt teaches too.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The grammar allows these characters and no others between the parts, and the parser relies on it.
"""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TAG = "<tool_call>"
BEFORE_NAME = '\n{"name": "'
BEFORE_ARGUMENTS = '", "arguments": '
END_TAG = "</tool_call>"
AFTER_ARGUMENTS = f"}}\n{END_TAG}"
BETWEEN_CALLS = "\n"


def call_text(name: str, arguments: str) -> str:
    """A call as an answer has it. arguments: JSON."""
    return f"{TAG}{BEFORE_NAME}{name}{BEFORE_ARGUMENTS}{arguments}{AFTER_ARGUMENTS}"
