"""Keeps generations in a file, so that they outlive a mesh whose Redis keeps nothing. Private, written as a whole."""

from __future__ import annotations

import json
from pathlib import Path

from services.common.blocks import TENANT_TAG_BYTES
from services.common.durable_file import replace_file
from services.common.generations import MAX_GENERATION, Generations


def load_generations(path: Path) -> Generations:
    """What the file holds; nothing where there is none. Raises OSError, or ValueError for a file that means nothing."""
    generations = Generations()
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return generations
    table = json.loads(text)
    if not isinstance(table, dict) or not all(_is_generation(*entry) for entry in table.items()):
        raise ValueError("not a table of generations")
    generations.merge({bytes.fromhex(tag): generation for tag, generation in table.items()})
    return generations


def _is_generation(tag: str, generation: object) -> bool:
    return len(tag) == 2 * TENANT_TAG_BYTES and isinstance(generation, int) and 0 <= generation <= MAX_GENERATION


def save_generations(path: Path, generations: Generations) -> None:
    """Replace the file. Raises OSError; then the old one may still be there."""
    table = {tag.hex(): generation for tag, generation in generations.beyond({}).items()}
    replace_file(path, json.dumps(table).encode("ascii"))
