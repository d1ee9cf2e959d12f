"""Typed reading of the fields of a config.json; a value of the wrong type refuses the model by naming the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.model.config import MAX_LAYERS
from services.worker.model.errors import UnsupportedModel

Fields = Mapping[str, Any]
_SHOWN_CHARACTERS = 80
# No model's field is beyond; what is cannot overflow what is computed from it.
LARGEST_INTEGER = 2**31 - 1
LARGEST, _SMALLEST = 1e30, 1e-30


def integer(fields: Fields, name: str, default: int | None = None) -> int:
    """An integer; where it is absent or null the default, which None means there is none."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {shown(value)}: an integer is needed")
    if abs(value) > LARGEST_INTEGER:
        raise UnsupportedModel(f"config field {name} = {shown(value)}: out of range")
    return value


def number(fields: Fields, name: str, default: float | None = None) -> float:
    """As `integer`, of any number."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config field {name} = {shown(value)}: a number is needed")
    if not -LARGEST <= value <= LARGEST:
        raise UnsupportedModel(f"config field {name} = {shown(value)}: out of range")
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
    if value < _SMALLEST:
        raise UnsupportedModel(f"config field {name} = {value}: must be positive")
    return value


def not_negative(fields: Fields, name: str, default: float | None = None) -> float:
    """As `number`, zero or over it."""
    value = number(fields, name, default)
    if value < 0.0:
        raise UnsupportedModel(f"config field {name} = {value}: must not be negative")
    return value


def num_layers(fields: Fields) -> int:
    """How many layers there are: a count that lists may be made of."""
    value = positive_integer(fields, "num_hidden_layers")
    if value > MAX_LAYERS:
        raise UnsupportedModel(f"config field num_hidden_layers = {value}: at most {MAX_LAYERS}")
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
        isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
        for value in values
    ):
        raise UnsupportedModel(f"config field {name} = {shown(values)}: a list of numbers is needed")
    return tuple(float(value) for value in values)


def shown(value: object) -> str:
    """A value as an error line shows it."""
    text = _bounded_repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _bounded_repr(value: object) -> str:
    """Python refuses to write out an integer of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"
