"""Typed reading of the fields of a config.json; a value of the wrong type refuses the model by naming the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.model.errors import UnsupportedModel

Fields = Mapping[str, Any]
_SHOWN_CHARACTERS = 80


def integer(fields: Fields, name: str, default: int | None = None) -> int:
    """An integer; where it is absent or null the default, which None means there is none."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {shown(value)}: an integer is needed")
    return value


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """As `integer`, of any number."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {shown(value)}: a number is needed")
    return float(value)


def positive_integer(fields: Fields, name: str, default: int | None = None) -> int:
    """As `integer`, over zero."""
    value = integer(fields, name, default)
    if value < 1:
        raise UnsupportedModel(f"config field {name} = {value}: must be positive")
    return value


def positive(fields: Fields, name: str, default: float | None = None) -> float:
    """As `number`, over zero."""
    value = number(fields, name, default)
    if not 0.0 < value < float("inf"):
        raise UnsupportedModel(f"config field {name} = {value}: must be positive")
    return value


def boolean(fields: Fields, name: str, default: bool = False) -> bool:
    """A truth value; absent or null: the default."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {shown(value)}: true or false is needed")
    return value


def numbers(fields: Fields, name: str) -> tuple[float, ...]:
    """A list of numbers."""
    values = fields.get(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise UnsupportedModel(f"config field {name} = {shown(values)}: a list of numbers is needed")
    return tuple(float(value) for value in values)


def shown(value: object) -> str:
    """A value as an error line shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
