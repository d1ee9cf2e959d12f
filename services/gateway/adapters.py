"""Low-rank adapters as requests name them: "base:adapter". Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

SEPARATOR = ":"


class AdapterView(msgspec.Struct, frozen=True):
    """A registered adapter. digest: of its content, 16 bytes. path: its folder, for workers."""

    digest: bytes
    rank: int
    path: str
    created_s: int = 0


# By the whole name.
Adapters = Mapping[str, AdapterView]


def base_and_adapter(name: str, models: Container[str], adapters: Adapters) -> tuple[str, AdapterView | None]:
    """The base model and the adapter that a name means; a model's own name comes first."""
    if name in models or name not in adapters:
        return name, None
    return name.rpartition(SEPARATOR)[0], adapters[name]
