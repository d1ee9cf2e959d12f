"""Formats of calls: found in templates, held by grammars, rendered in prompts, read where tags are control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.grammars import compile_grammar
from services.gateway.api.openai_parse import CHAT, parse_openai
from services.gateway.config import GatewaySettings
from services.gateway.errors import InvalidRequest
from services.gateway.request import ToolUse
from services.gateway.text.text_model import TextModel
from services.gateway.tools.call_format import FORMATS
from services.gateway.tools.tool_use import tool_form
from tests.support.call_formats import WRITERS, Writer, llama3, llama3_tagged
from tests.support.call_models import (
    LLAMA3_TEMPLATE,
    QWEN_CODER_TEMPLATE,
    TEMPLATES,
    family_grammars,
    family_model,
)
from tests.support.tools import TOOLS, function

PARIS = ("get_weather", '{"city": "Paris"}')
NOW = ("get_time", "{}")
USER: Any = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
each_writer = pytest.mark.parametrize(
    ("name", "write"), [(one.name, write) for one, write in WRITERS], ids=[write.__name__ for _, write in WRITERS]
)
Models = Callable[..., TextModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model by its template and, where it is set, its format; each is made once."""
    return cache(lambda *given: family_model(tmp_path_factory.mktemp("model"), *given))


def verdict(model: TextModel, answer: str, *, spelled: bool = False, **fields: Any) -> str:
    """Whether the grammar of a request lets an answer be: "whole", "begun" or "" when it does not.

    spelled: no token of the answer is a control token.
    """
    body = {"model": "m", "messages": [USER], "tools": TOOLS, **fields}
    use = parse_openai(CHAT, json.dumps(body).encode())[0].form
    assert isinstance(use, ToolUse)
    matcher = compile_grammar(family_grammars(), tool_form(use, model.calls.format, model.calls.control).grammar)
    model.tokenizer.encode_special_tokens = spelled or not model.calls.control
    ids = model.encode_text(answer)
    model.tokenizer.encode_special_tokens = False
    if matcher.validate_tokens(ids) < len(ids):
        return ""
    matcher.consume_tokens(ids)
    return "whole" if matcher.is_accepting() else "begun"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_in_its_template(models: Models, name: str) -> None:
    calls = models(TEMPLATES[name]).calls
    assert (calls.format.name, calls.is_native, calls.is_unknown) == (name, True, False)
    assert set(calls.control) == set(FORMATS[name].control)


@pytest.mark.parametrize(
    ("template", "setting", "name", "native", "unknown"),
    [
        (PLAIN, None, "hermes", False, False),
        (PLAIN, "mistral", "mistral", False, False),
        (LLAMA3_TEMPLATE, "hermes", "hermes", True, False),
        (LLAMA3_TEMPLATE, "generic", "hermes", False, False),
        (PLAIN + "{{ tools }}<tool_call><arg_key>", None, "hermes", False, True),
        (PLAIN + "{{ tools }}<|tool_calls_begin|>", None, "hermes", False, True),
        (LLAMA3_TEMPLATE + "<|python_start|>", None, "hermes", False, True),
        (PLAIN + "{{ tools }}<|tool_calls_begin|>", "mistral-args", "mistral-args", True, False),
    ],
)
def test_a_format_can_be_set_and_none_is_guessed(
    models: Models, template: str, setting: str | None, name: str, native: bool, unknown: bool
) -> None:
    calls = models(template, setting).calls
    assert (calls.format.name, calls.is_native, calls.is_unknown) == (name, native, unknown)
    assert bool(calls.control) is native


def test_settings_name_models_and_formats_that_there_are() -> None:
    good = GatewaySettings(call_formats="smollm2-135m=llama3")
    assert good.call_format_of == {"smollm2-135m": "llama3"}
    for bad in ("smollm2-135m=llama", "other=llama3", "llama3", "smollm2-135m=llama3,smollm2-135m=hermes"):
        with pytest.raises(ValidationError, match="call_formats"):
            GatewaySettings(call_formats=bad)


@each_writer
@pytest.mark.parametrize("is_native", [True, False], ids=["control", "text"])
def test_answers_are_held_to_their_calls(models: Models, name: str, write: Writer, is_native: bool) -> None:
    """With tags that are control tokens, and with tags that are text."""
    model = models(TEMPLATES[name]) if is_native else models(PLAIN, name)
    assert bool(model.calls.control) is is_native
    before = "" if write is llama3 else "Well.\n"
    choice = {"type": "function", "function": {"name": "get_time"}}
    assert verdict(model, "Well.") == "whole"
    assert verdict(model, before + write([PARIS])) == "whole"
    assert verdict(model, write([PARIS]), tool_choice="required") == "whole"
    assert verdict(model, write([NOW]), tool_choice=choice) == "whole"
    assert verdict(model, write([PARIS]), tool_choice=choice) == ""
    assert verdict(model, "Well.", tool_choice="required") == ""
    assert verdict(model, write([PARIS]) + "!") == ""
    assert verdict(model, write([("get_weather", "{}")])) == ""
    assert verdict(model, write([PARIS]).partition("Paris")[0]) == "begun"
    if write is not llama3:
        assert verdict(model, before + write([("other", "{}")])) == ""
    if not FORMATS[name].is_single:
        assert verdict(model, write([PARIS, NOW])) == "whole"
        assert verdict(model, write([PARIS, NOW]), parallel_tool_calls=False) == ""
        assert verdict(model, write([NOW] * 16)) == "whole"
        assert verdict(model, write([NOW] * 17)) == ""


@each_writer
def test_text_does_not_spell_a_tag_that_is_a_control_token(models: Models, name: str, write: Writer) -> None:
    """It would be read as a call, of whatever arguments."""
    model, tag = models(TEMPLATES[name]), FORMATS[name].tag
    write = llama3_tagged if write is llama3 else write
    called = write([("get_weather", '{"evil": 1}')])
    assert called.startswith(tag)
    for answer in (called, f"Sure: {called} and so on", f"Sure: {tag}"):
        assert verdict(model, answer, spelled=True) == ""
    assert verdict(model, f"Sure: {tag[:-1]} and {tag[1:]}", spelled=True) == "whole"


NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Any."},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "limits": {"$ref": "#/$defs/limits"},
        "id": {"type": "string", "maxLength": 3},
    },
    "required": ["text"],
    "$defs": {"limits": {"type": "array", "items": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    ("parameters", "held"),
    [
        ([("text", "a\n<b> </parameter>")], "whole"),
        ([("text", ""), ("kind", "b"), ("limits", "[1, 2]"), ("id", '"abc"')], "whole"),
        ([("text", ""), ("limits", "[]")], "whole"),
        ([], ""),
        ([("kind", "a")], ""),
        ([("text", ""), ("kind", "c")], ""),
        ([("text", ""), ("limits", '["x"]')], ""),
        ([("text", ""), ("id", '"abcd"')], ""),
        ([("text", ""), ("id", "abc")], ""),
        ([("text", ""), ("other", "1")], ""),
        ([("kind", "a"), ("text", "")], ""),
    ],
)
def test_parameters_keep_to_their_schema(models: Models, parameters: list[tuple[str, str]], held: str) -> None:
    model = models(QWEN_CODER_TEMPLATE)
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    answer = f"<tool_call>\n<function=note>\n{written}</function>\n</tool_call>"
    assert verdict(model, answer, tools=[function("note", NOTE)]) == held


# Of an object as a whole; JSON Schema has them all.
OF_OBJECTS: dict[str, Any] = {
    "minProperties": 1,
    "maxProperties": 1,
    "const": {"a": 1},
    "enum": [{"a": 1}],
    "propertyNames": {"maxLength": 3},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{}]},
        {"properties": {"a>b": {}}},
        {"patternProperties": {}},
        {"required": 5},
        {"required": ["a"]},
        *({"properties": {"a": {}}, keyword: value} for keyword, value in OF_OBJECTS.items()),
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
        {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/b"}]}, "b": {}}},
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"items": {"$ref": "#/properties/b"}}}},
    ],
)
def test_arguments_that_cannot_be_written_one_by_one_are_refused(models: Models, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        verdict(models(QWEN_CODER_TEMPLATE), "", tools=[function("f", schema)])
    assert caught.value.param == "tools[0].function.parameters"


def test_what_only_looks_like_a_reference_is_none(models: Models) -> None:
    """The name of an argument, and a value."""
    names = {"$ref": {"type": "string"}, "enum": {"enum": [{"$ref": "#/properties/a"}]}}
    schema = {"type": "object", "title": "F", "description": "Any.", "properties": names}
    answer = "<tool_call>\n<function=f>\n<parameter=$ref>\na\n</parameter>\n</function>\n</tool_call>"
    assert verdict(models(QWEN_CODER_TEMPLATE), answer, tools=[function("f", schema)]) == "whole"


def test_json_that_calls_nothing_is_text(models: Models) -> None:
    """Where calls need no tag."""
    model = models(LLAMA3_TEMPLATE)
    assert verdict(model, '{"name": "John", "parameters": {}}') == "whole"
    assert verdict(model, '{"name": "get_weather_soon"}') == "whole"
    assert verdict(model, '{"name": "get_weather"') == "begun"
    assert verdict(model, '{"name": "get_weather"}') == ""
    # Of some tokenizers' answers the first space is not shown.
    assert verdict(model, ' {"name": "get_weather", "parameters": {"evil": 1}}') == ""
    assert verdict(model, ' {"name": "John"}') == "whole"
    assert verdict(model, 'It is {"name": "get_weather"}') == "whole"
    assert verdict(model, llama3_tagged([NOW]) + llama3([NOW])) == ""
