"""Entries of a stream in Redis, and their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = dict[bytes, bytes]
# Milliseconds and number, as they sort.
Position = tuple[int, int]


def entries_of(reply: Any) -> list[tuple[bytes, Fields]]:
    """(position, fields) of all entries in the reply to an XREAD, of RESP 3: parts, lists of entries, by stream."""
    if not isinstance(reply, Mapping):
        return []
    return [(position, fields) for parts in reply.values() for part in parts for position, fields in part]


def format_position(position: Position) -> str:
    """As Redis takes it."""
    return f"{position[0]}-{position[1]}"


def parse_position(position: bytes) -> Position:
    """From what Redis gives. Raises ValueError for anything else."""
    milliseconds, _, number = position.partition(b"-")
    return int(milliseconds), int(number)
