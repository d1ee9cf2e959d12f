"""What is counted of the use of models, and how it lies in Redis. Pure.

Everything is a whole number, so that sums are exact in whatever order they are made. In Redis each day (UTC) is a hash;
a field names tenant, model and figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

# Sums of a day are kept for so long.
KEEP_DAYS: Final = 400
COST_UNIT: Final = 10**9
ACCELERATOR_UNIT: Final = 10**6


class Usage(msgspec.Struct, frozen=True):
    """Requests that a worker had taken, their tokens, and what they cost. Not negative.

    prompt_tokens: cached ones included. cached_*: of them those that were not computed, by the tier that had them.
    accelerator_us: microseconds of the steps of engines. cost_nano: billionths of the price table's currency.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_local: int = 0
    cached_peer: int = 0
    cached_ram: int = 0
    cached_ssd: int = 0
    output_tokens: int = 0
    accelerator_us: int = 0
    cost_nano: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self.figures(), other.figures(), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(self.figures(), other.figures(), strict=True)))

    def __bool__(self) -> bool:
        return any(self.figures())

    def figures(self) -> tuple[int, ...]:
        """In the order of FIGURES."""
        values: tuple[int, ...] = msgspec.structs.astuple(self)
        return values

    @property
    def cached_tokens(self) -> int:
        """Of all tiers."""
        return self.cached_local + self.cached_peer + self.cached_ram + self.cached_ssd


FIGURES: Final = tuple(Usage.__struct_fields__)


class UsageKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What sums are kept of. day: ISO date, UTC."""

    day: str
    tenant: str
    model: str


def field_of(key: UsageKey, figure: str) -> bytes:
    """Field of a day's hash."""
    return msgspec.json.encode([key.tenant, key.model, figure])


def usages_of(day: str, fields: Mapping[bytes, bytes]) -> dict[UsageKey, Usage]:
    """From a day's hash. What cannot be read, such as figures of a later release, is left out."""
    found: dict[UsageKey, dict[str, int]] = {}
    for field, value in fields.items():
        try:
            tenant, model, figure = msgspec.json.decode(field, type=tuple[str, str, str])
            number = int(value)
        except (msgspec.MsgspecError, ValueError):
            continue
        if figure in FIGURES:
            found.setdefault(UsageKey(day, tenant, model), {})[figure] = number
    return {key: Usage(**figures) for key, figures in found.items()}
