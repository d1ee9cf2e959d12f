"""Recorded functions and conversations for tests and benches of tool calls.

Functions are those of BFCL's multi-turn categories (`bfcl_tools.json.gz`), in sets that belong together. Conversations
with calls and results are those of tau-bench's airline (`taubench_airline_chats.jsonl.gz`; its functions are not in
it). Of BFCL's (`bfcl_multiturn_users.jsonl.gz`) only the user's part is recorded.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tool = dict[str, Any]
Message = dict[str, Any]
_BESIDE = Path(__file__).parents[2] / "shared" / "traces"
# BFCL names types as Python does.
_TYPES = {"dict": "object", "float": "number"}
# Classes of conversations, and the sets that their functions are in.
_SETS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A whole conversation: messages as the chat API has them."""

    name: str
    messages: list[Message]

    def requests(self) -> Iterator[list[Message]]:
        """What was said before each message of the assistant."""
        for position, message in enumerate(self.messages):
            if message["role"] == "assistant":
                yield self.messages[:position]


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation's user. turns: what is said in each. sets: of the functions that it is about."""

    name: str
    turns: list[str]
    sets: tuple[str, ...]


def traces_folder() -> Path | None:
    """$KVMESH_TRACES, else shared/traces beside the checkout; None where there is neither."""
    folder = Path(os.environ.get("KVMESH_TRACES") or _BESIDE)
    return folder if (folder / "bfcl_tools.json.gz").is_file() else None


def function_sets(folder: Path) -> dict[str, list[Tool]]:
    """Tools by set, as published but for the form that the chat API has. Raises OSError."""
    read = json.loads(gzip.decompress((folder / "bfcl_tools.json.gz").read_bytes()))
    return {
        name: [
            {"type": "function", "function": {key: one[key] for key in ("name", "description", "parameters")}}
            for one in functions
        ]
        for name, functions in read.items()
    }


def with_json_types(tool: Tool) -> Tool:
    """The same with the names that JSON schemas have for types."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _renamed(function["parameters"])}}


def recorded(folder: Path) -> list[Recorded]:
    """Shortest first, so that any number of them are those that fit a small model. Raises OSError."""
    rows = _rows(folder / "taubench_airline_chats.jsonl.gz")
    return sorted((Recorded(row["session"], row["messages"]) for row in rows), key=lambda one: len(str(one.messages)))


def asked(folder: Path) -> list[Asked]:
    """In the order of the file. Raises OSError."""
    return [
        Asked(row["id"], ["\n".join(turn) for turn in row["turns"]], tuple(_SETS[name] for name in row["classes"]))
        for row in _rows(folder / "bfcl_multiturn_users.jsonl.gz")
    ]


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in gzip.decompress(path.read_bytes()).splitlines():
        yield json.loads(line)


def _renamed(schema: Mapping[str, Any]) -> dict[str, Any]:
    renamed = dict(schema)
    if isinstance(schema.get("type"), str):
        renamed["type"] = _TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        renamed["properties"] = {name: _renamed(one) for name, one in schema["properties"].items()}
    if "items" in schema:
        renamed["items"] = _renamed(schema["items"])
    return renamed
