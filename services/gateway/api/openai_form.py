"""The form of the answer that a body asks for: OpenAI's response_format, and vLLM's fields for the same. Pure."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.api.openai_schema import CommonBody, ResponseFormat, StructuredOutputs
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.grammars.formats import choice_form, grammar_form, json_form, object_form, regex_form
from services.gateway.request import AnswerForm

_NO_WHITE_SPACE = ""


def answer_form(body: CommonBody) -> AnswerForm | None:
    """None when answers are free. Raises InvalidRequest."""
    given: dict[str, Callable[[], AnswerForm | None]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = lambda: _response_format(body.response_format, body.guided_whitespace_pattern)
    if body.structured_outputs is not None:
        given["structured_outputs"] = lambda: _structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        given["guided_json"] = lambda: json_form("guided_json", body.guided_json, body.guided_whitespace_pattern)
    if body.guided_regex is not None:
        given["guided_regex"] = lambda: regex_form("guided_regex", body.guided_regex)
    if body.guided_choice is not None:
        given["guided_choice"] = lambda: choice_form("guided_choice", body.guided_choice)
    if body.guided_grammar is not None:
        given["guided_grammar"] = lambda: grammar_form("guided_grammar", body.guided_grammar)
    if len(given) > 1:
        raise InvalidRequest(f"only one of {', '.join(given)} can be given", list(given)[-1])
    return next(iter(given.values()))() if given else None


def _response_format(given: ResponseFormat | None, white_space: str | None) -> AnswerForm | None:
    assert given is not None
    if given.type == "json_object":
        return object_form("response_format", white_space)
    if given.type != "json_schema":
        raise UnsupportedParameter(
            f"response_format.type: {given.type!r} is none of text, json_object, json_schema", "response_format.type"
        )
    if given.json_schema is None:
        raise InvalidRequest("response_format.json_schema must be given", "response_format.json_schema")
    schema = {} if given.json_schema.schema is None else given.json_schema.schema
    return json_form("response_format.json_schema.schema", schema, white_space)


def _structured_outputs(given: StructuredOutputs | None) -> AnswerForm | None:
    assert given is not None
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name):
            raise UnsupportedParameter(f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
    white_space = _NO_WHITE_SPACE if given.disable_any_whitespace else given.whitespace_pattern
    at = "structured_outputs"
    forms: dict[str, Callable[[], AnswerForm]] = {}
    if given.json is not None:
        forms["json"] = lambda: json_form(f"{at}.json", given.json, white_space)
    if given.regex is not None:
        forms["regex"] = lambda: regex_form(f"{at}.regex", given.regex)
    if given.choice is not None:
        forms["choice"] = lambda: choice_form(f"{at}.choice", given.choice)
    if given.grammar is not None:
        forms["grammar"] = lambda: grammar_form(f"{at}.grammar", given.grammar)
    if given.json_object:
        forms["json_object"] = lambda: object_form(f"{at}.json_object", white_space)
    if len(forms) != 1:
        raise InvalidRequest(f"{at}: exactly one of json, regex, choice, grammar, json_object", at)
    return next(iter(forms.values()))()
