"""Functions that tests let models call."""

from __future__ import annotations

from typing import Any


def function(name: str, parameters: Any, description: str = "") -> dict[str, Any]:
    """A tool as the OpenAI API has it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city"],
    },
    "The weather in a city.",
)
CLOCK = function("get_time", {"type": "object", "properties": {}}, "The time of day.")
TOOLS = [WEATHER, CLOCK]
