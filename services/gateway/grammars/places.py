"""Where in a JSON schema the error is that its compilation only describes. Pure but for the compilation it is given.

The deepest part is looked for that fails by itself, given the definitions of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_COMPILATIONS = 200
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose value is a schema, a list of schemas, an object of schemas.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", *_DEFINITIONS)


def place_of_error(grammar: str, fails: Callable[[str], bool]) -> str:
    """JSON pointer of the part that `fails`, such as "#/properties/a"; "" when it is the whole, or no schema."""
    whole = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {}
    schema = whole.get("json_schema")
    if not isinstance(schema, Mapping):
        return ""
    shared = {name: schema[name] for name in ("x-guidance", *_DEFINITIONS) if name in schema}
    compilations = 0

    def part_fails(part: Mapping[str, Any]) -> bool:
        nonlocal compilations
        compilations += 1
        return compilations <= _MAX_COMPILATIONS and fails(
            json.dumps({"grammars": [{"json_schema": {**shared, **part}}]})
        )

    place = ""
    while (found := next((pair for pair in _parts(schema) if part_fails(pair[1])), None)) is not None:
        step, schema = found
        place = f"{place or '#'}/{step}"
    return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Schemas within a schema, with the way there."""
    found = [(name, schema.get(name)) for name in _ONE]
    found += [(f"{name}/{i}", part) for name in _LIST for i, part in _pairs(schema.get(name))]
    found += [(f"{name}/{key}", part) for name in _NAMED for key, part in _pairs(schema.get(name))]
    for step, part in found:
        if isinstance(part, Mapping):
            yield step, part


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [(str(key).replace("~", "~0").replace("/", "~1"), part) for key, part in value.items()]
    return list(enumerate(value)) if isinstance(value, list) else []
