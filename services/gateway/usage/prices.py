"""What use costs: a price table in a file, read again when it changes. Costs are whole billionths of its currency."""

from __future__ import annotations

import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import msgspec

from services.common.settings import ConfigurationError
from services.common.usage import ACCELERATOR_UNIT, COST_UNIT, Usage
from services.common.watched_file import WatchedFile

_Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_MILLION, _HOUR_S = 10**6, 3600


class ModelPrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one model, in the table's currency. Cached prompt tokens have a price of their own; None: the prompt's."""

    request: _Price = 0.0
    prompt_million: _Price = 0.0
    cached_million: _Price | None = None
    output_million: _Price = 0.0
    accelerator_hour: _Price = 0.0

    def cost_nano(self, usage: Usage) -> int:
        """Of a use, rounded once."""
        cached_million = self.prompt_million if self.cached_million is None else self.cached_million
        parts = (
            (self.request, usage.requests, 1),
            (self.prompt_million, max(0, usage.prompt_tokens - usage.cached_tokens), _MILLION),
            (cached_million, usage.cached_tokens, _MILLION),
            (self.output_million, usage.output_tokens, _MILLION),
            (self.accelerator_hour, usage.accelerator_us, _HOUR_S * ACCELERATOR_UNIT),
        )
        # Decimal as it was written: 0.1 is a tenth.
        total = sum((Fraction(str(price)) * count / per for price, count, per in parts), Fraction())
        return round(total * COST_UNIT)


class Prices:
    """Knows the prices of every model. Without a file nothing costs anything."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError when the file cannot be read or is wrong."""
        self._file = None if path is None else WatchedFile(path, parse_prices, service="gateway", setting="prices_file")
        self._free = ModelPrices()

    def of(self, model: str, now_s: float) -> ModelPrices:
        """The model's. now_s: monotonic time."""
        if self._file is None:
            return self._free
        self._file.refresh(now_s)
        prices = self._file.value
        return prices.get(model, prices[""])


def parse_prices(text: str) -> dict[str, ModelPrices]:
    """Prices by model, those of others under "". Raises ConfigurationError naming the table."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(str(error)) from None
    for name in document.keys() - {"default", "models"}:
        raise ConfigurationError(f"{name}: only [default] and [models.NAME] are known")
    default = document.get("default", {})
    tables = document.get("models", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigurationError("models: must be tables [models.NAME]")
    prices = {"": _prices("default", default)}
    return prices | {name: _prices(f"models.{name}", {**default, **table}) for name, table in tables.items()}


def _prices(where: str, table: Any) -> ModelPrices:
    try:
        return msgspec.convert(table, ModelPrices)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
