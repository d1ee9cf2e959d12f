"""Strategies for messages as a later release may send them: with fields and enum values that nobody here knows."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
# Field 30,000 as a number and 30,001 as a text, which no message here has.
UNKNOWN_FIELDS = b"\x80\xd3\x0e\x07" + b"\x8a\xd3\x0e\x05later"
_MAX_DEPTH = 3
# Of known fields values that may be true: what is unknown is the matter here.
_VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_DOUBLE: st.floats(0, 1e9),
    FieldDescriptor.TYPE_FLOAT: st.floats(0, 2, width=32),
    FieldDescriptor.TYPE_INT64: st.integers(0, 2**40),
    FieldDescriptor.TYPE_STRING: st.text(max_size=12),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**40),
}


def later(kind: type[M]) -> st.SearchStrategy[M]:
    """Any message of a kind, with what is unknown at every level."""
    return _fields(kind.DESCRIPTOR, 0).map(lambda values: _message(kind, values))


def _fields(descriptor: Descriptor, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = [one for one in descriptor.fields if depth < _MAX_DEPTH or one.message_type is None]
    chosen = {one.name: _value(one, depth) for one in fields}
    return st.fixed_dictionaries({}, optional=chosen)


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name
        return st.dictionaries(_one(of["key"], depth + 1), _one(of["value"], depth + 1), max_size=2)
    one = _one(field, depth)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _one(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _fields(field.message_type, depth + 1)
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, max(known) + 1, 99])
    return _VALUES[field.type]


def _message(kind: type[M], values: dict[str, Any]) -> M:
    """Of a oneof the last one named counts. The unknown fields come with each nested message, too."""
    message = kind()
    for name, value in values.items():
        _set(message, kind.DESCRIPTOR.fields_by_name[name], value)
    message.MergeFromString(UNKNOWN_FIELDS)
    return message


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    target = getattr(message, field.name)
    if isinstance(value, dict) and field.message_type.GetOptions().map_entry:
        for key, one in value.items():
            target[key] = one
    elif field.message_type is None:
        if field.is_repeated:
            target.extend(value)
        else:
            setattr(message, field.name, value)
    elif field.is_repeated:
        for one in value:
            _fill(target.add(), one)
    else:
        target.SetInParent()
        _fill(target, value)


def _fill(message: Message, values: dict[str, Any]) -> None:
    for name, value in values.items():
        _set(message, message.DESCRIPTOR.fields_by_name[name], value)
    message.MergeFromString(UNKNOWN_FIELDS)
