"""Reading the JSON log of a process that is still writing it."""

from __future__ import annotations

import json
from typing import Any


def log_events(text: str, containing: str = "") -> list[dict[str, Any]]:
    """The log lines in `text` that are JSON objects and contain a string; a last line without its end is left out."""
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{") and containing in line]
