"""The forms that an answer can be held to, as the APIs name them, into grammars. Pure; says which field is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from services.common.grammars import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from services.gateway.errors import InvalidRequest
from services.gateway.request import AnswerForm

MAX_CHOICES = 1000
_ANY_OBJECT = {"type": "object"}


def json_form(field: str, schema: Any, white_space: str | None = None) -> AnswerForm:
    """JSON of a schema, given as an object, as its JSON or as a truth value. Raises InvalidRequest."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{field}: the schema is not valid JSON: {error}", field) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{field}: a JSON schema is an object", field)
    try:
        return AnswerForm(json_schema_grammar(schema, white_space), field)
    except RecursionError:
        raise InvalidRequest(f"{field}: the schema is nested too deeply", field) from None


def object_form(field: str, white_space: str | None = None) -> AnswerForm:
    """Any JSON object."""
    return AnswerForm(json_schema_grammar(_ANY_OBJECT, white_space), field)


def regex_form(field: str, regex: Any) -> AnswerForm:
    """A regular expression. Raises InvalidRequest."""
    return AnswerForm(regex_grammar(_text(field, regex)), field)


def choice_form(field: str, choices: Any) -> AnswerForm:
    """One of several texts. Raises InvalidRequest."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise InvalidRequest(f"{field}: must be a list of texts, and not empty", field)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{field}: at most {MAX_CHOICES} choices, not {len(choices)}", field)
    return AnswerForm(choice_grammar([_text(field, choice) for choice in choices]), field)


def grammar_form(field: str, text: Any) -> AnswerForm:
    """A grammar in Lark's notation or in llama.cpp's (GBNF). Raises InvalidRequest."""
    try:
        lark = any_to_lark(_text(field, text))
    except InvalidRequest:
        raise
    except Exception as error:  # the converter raises whatever it stumbles over
        raise InvalidRequest(f"{field}: neither a Lark nor a GBNF grammar: {error}", field) from None
    return AnswerForm(lark_grammar(lark), field)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field}: must be a text, and not empty", field)
    return value
