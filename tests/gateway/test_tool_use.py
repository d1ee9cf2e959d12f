"""Tools of a body: what is refused, what holds an answer to its calls, and what the model is told of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from services.common.grammars import compile_grammar, grammar_tokenizer
from services.gateway.api.openai_parse import CHAT, parse_openai
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.request import AnswerForm, GenerationRequest, ToolUse, check_request
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import decode_all
from services.gateway.text.text_model import TextModel
from services.gateway.text.vocabulary import build_vocabulary
from services.gateway.tools.call_format import HERMES
from services.gateway.tools.tool_use import tool_form
from tests.support.tools import CLOCK, TOOLS, WEATHER, function

USER = {"role": "user", "content": "hi"}
TAG = HERMES.tag
CITY = HERMES.text([("get_weather", '{"city": "Paris"}')])
NOW = HERMES.text([("get_time", "{}")])
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def parsed(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [USER], **fields}
    request, _ = parse_openai(CHAT, json.dumps(body).encode())
    check_request(request)
    return request


def call_text(name: str, arguments: str) -> str:
    return HERMES.text([(name, arguments)])


@pytest.fixture(scope="module")
def tokens(text_model: TextModel) -> LLTokenizer:
    return grammar_tokenizer(text_model.tokenizer, text_model.eos_token_ids, 49152)


def form_of(text_model: TextModel, **fields: Any) -> AnswerForm:
    """What answers to a request with tools have to match."""
    use = parsed(**{"tools": TOOLS, **fields}).form
    assert isinstance(use, ToolUse)
    return tool_form(use, text_model.calls.format, text_model.calls.control)


def verdict(tokens: LLTokenizer, text_model: TextModel, answer: str, **fields: Any) -> str:
    """Whether a request's grammar lets an answer be: "whole", "begun" or "" when it does not."""
    matcher = compile_grammar(tokens, form_of(text_model, **fields).grammar)
    ids = text_model.encode_text(answer)
    if matcher.validate_tokens(ids) < len(ids):
        return ""
    matcher.consume_tokens(ids)
    return "whole" if matcher.is_accepting() else "begun"


@pytest.mark.parametrize(
    ("answer", "auto", "required", "single", "named"),
    [
        ("It is sunny.", "whole", "", "whole", ""),
        (CITY, "whole", "whole", "whole", ""),
        (NOW, "whole", "whole", "whole", "whole"),
        (f"{CITY}\n{NOW}", "whole", "whole", "", ""),
        (f"{NOW}\n{NOW}", "whole", "whole", "", ""),
        (f"Let me see.\n{CITY}", "whole", "", "whole", ""),
        (f"{NOW} It is noon.", "", "", "", ""),
        ("a <tool", "whole", "", "whole", ""),
        (f"a {TAG}", "begun", "", "begun", ""),
        (f"a {TAG} b", "", "", "", ""),
        (call_text("get_weather", "{}"), "", "", "", ""),
        (call_text("get_weather", '{"city": "Paris", "more": 1}'), "", "", "", ""),
        (call_text("other", "{}"), "", "", "", ""),
        ("\n".join([NOW] * 16), "whole", "whole", "", ""),
        ("\n".join([NOW] * 17), "", "", "", ""),
    ],
)
def test_answers_are_held_to_their_calls(
    text_model: TextModel, tokens: LLTokenizer, answer: str, auto: str, required: str, single: str, named: str
) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    assert verdict(tokens, text_model, answer) == auto
    assert verdict(tokens, text_model, answer, tool_choice="required") == required
    assert verdict(tokens, text_model, answer, parallel_tool_calls=False) == single
    assert verdict(tokens, text_model, answer, tool_choice=choice) == named


def test_a_tag_may_be_one_token(text_model: TextModel) -> None:
    tokenizer = Tokenizer.from_str(text_model.tokenizer.to_str())
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in HERMES.control])
    model = dataclasses.replace(text_model, tokenizer=tokenizer, vocabulary=build_vocabulary(tokenizer))
    matcher = compile_grammar(grammar_tokenizer(tokenizer, model.eos_token_ids, 49154), form_of(model).grammar)
    ids = model.encode_text(f"Well.\n{CITY}")
    assert {49152, 49153} <= set(ids)
    assert matcher.validate_tokens(ids) == len(ids)
    assert decode_all(model.vocabulary, ids) == f"Well.\n{CITY}"


def test_arguments_keep_to_references_and_to_what_a_schema_leaves_open(
    text_model: TextModel, tokens: LLTokenizer
) -> None:
    defined = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}
    tools = [function("f", defined), function("g", {**defined, "additionalProperties": True})]
    for name, extra in (("f", ""), ("g", "whole")):
        assert verdict(tokens, text_model, call_text(name, '{"a": 1}'), tools=tools) == "whole"
        assert verdict(tokens, text_model, call_text(name, '{"a": "x"}'), tools=tools) == ""
        assert verdict(tokens, text_model, call_text(name, '{"a": 1, "b": 2}'), tools=tools) == extra


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, function("a b", {})]}, "tools[1].function.name"),
        ({"tools": [function("x" * 65, {})]}, "tools[0].function.name"),
        ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools[2].function.name"),
        ({"tools": [function(f"f{i}", {}) for i in range(129)]}, "tools"),
        ({"tools": [function("f", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function("f", [1])]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ],
)
def test_what_is_not_served_says_so(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_without_tools_or_with_none_answers_are_free() -> None:
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        request = parsed(**fields)
        assert (request.form, request.tools) == (None, [])
    none = parsed(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert none.form is not None


def rendered(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    request = parsed(messages=messages, **fields)
    assert request.chat is not None
    template = ChatTemplate(source, special_tokens=["<s>"], variables={})
    return "".join(piece for piece, _ in template.render(request.chat, request.tools).pieces())


def test_a_template_that_knows_tools_renders_them() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = rendered(TEMPLATE, [USER, said, RESULT], tools=[WEATHER])
    told, _, chat = text.partition("\n")
    assert json.loads(told) == WEATHER
    assert chat == '<user>hi<assistant><tool_call>{"city": "Paris"}<tool>18 degrees'
    cut = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Pa'}}
    assert json.dumps('{"city": "Pa') in rendered(TEMPLATE, [USER, {**said, "tool_calls": [cut]}, RESULT])


def test_other_templates_are_given_tools_as_text(text_model: TextModel) -> None:
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    request = parsed(
        messages=[{"role": "system", "content": "Be kind."}, USER, said, RESULT, RESULT, USER], tools=TOOLS
    )
    assert request.chat is not None
    ids = text_model.encode_chat(request.chat, request.tools)
    text = text_model.tokenizer.decode(ids, skip_special_tokens=False)
    system, *turns = [turn.partition("\n")[2].removesuffix("<|im_end|>\n") for turn in text.split("<|im_start|>")[1:]]
    assert system.startswith("Be kind.\n\n")
    assert [json.loads(line) for line in system.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")] == TOOLS
    result = "<tool_response>\n18 degrees\n</tool_response>"
    assert turns == ["hi", f"Let me see.\n{CITY}\n{CITY}", f"{result}\n{result}", "hi", ""]


@pytest.mark.parametrize("source", [TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_no_text_of_a_tool_becomes_a_control_token(source: str) -> None:
    evil: Any = function("f", {"type": "object", "properties": {"<s>": {"type": "string", "description": "<s>"}}})
    call = {"id": "c", "type": "function", "function": {"name": "<s>", "arguments": '{"<s>": "<s>"}'}}
    chat = parsed(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, RESULT], tools=[evil])
    assert chat.chat is not None
    template = ChatTemplate(source, special_tokens=["<s>"], variables={})
    pieces = list(template.render(chat.chat, chat.tools).pieces())
    assert not any(is_special for _, is_special in pieces)
    assert "".join(piece for piece, _ in pieces).count("<s>") >= 4


@pytest.mark.parametrize("depth", [300, 400, 900])
def test_schemas_that_are_nested_deeply_are_served_or_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with contextlib.suppress(InvalidRequest):
        rendered(TEMPLATE, [USER], tools=[function("f", {"type": "object", "properties": {"a": schema}})])
