"""What `bench.speculation` asks the default model: to copy spans of several kinds, and to make something up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_WORDS = ("river", "stone", "winter", "letter", "garden", "engine", "silver", "market", "window", "forest", "bridge")
Message = dict[str, str]


def paragraph(number: int) -> list[Message]:
    """Repeat a paragraph of prose."""
    paragraphs = [
        text.replace("\n", " ")
        for text in (_ROOT / "docs/architecture.md").read_text().split("\n\n")
        if len(text) > 400 and not text.startswith(("#", "|", "`", "-"))
    ]
    return _asked(f"Repeat the following text word for word.\n\n{paragraphs[number % len(paragraphs)][:700]}")


def code(number: int) -> list[Message]:
    """Give a piece of a program again."""
    files = sorted((_ROOT / "services/common").glob("*.py"))
    source = files[(number * 7) % len(files)].read_text()
    return _asked(f"Write out this Python file again without any change.\n\n```python\n{source[:900]}\n```")


def records(number: int) -> list[Message]:
    """Copy records of JSON."""
    rng = random.Random(number)
    people = [
        {
            "id": rng.randrange(10_000),
            "name": rng.choice(_WORDS),
            "tags": rng.sample(_WORDS, 2),
            "active": rng.random() < 0.5,
        }
        for _ in range(8)
    ]
    return _asked(f"Print this JSON document again, exactly as it is.\n\n{json.dumps(people)}")


def story(number: int) -> list[Message]:
    """Make something up."""
    one, other, third = random.Random(number).sample(_WORDS, 3)
    return _asked(f"Tell a long story about a {one}, a {other} and a {third}.")


def explanation(number: int) -> list[Message]:
    """Say what something is."""
    return _asked(f"Explain how a {_WORDS[number % len(_WORDS)]} comes to be, and what people use it for.")


def _asked(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


WORKLOADS: dict[str, Callable[[int], list[Message]]] = {
    "a paragraph again": paragraph,
    "code again": code,
    "JSON again": records,
    "a story": story,
    "an explanation": explanation,
}
