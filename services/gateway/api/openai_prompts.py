"""What completions and embeddings read alike: prompts or inputs, and the names of priority classes. Pure."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import InvalidRequest

PRIORITIES = {"interactive": 1, "standard": 2, "batch": 3}


def prompts_of(given: str | list[Any], param: str) -> list[str | list[int]]:
    """One or several texts or lists of token ids. Raises InvalidRequest where they are mixed."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise InvalidRequest(
            f"{param} must be a string, or a list of strings, of token ids or of token id lists", param
        )
    return [given] if kinds == {int} else given
