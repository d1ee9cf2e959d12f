"""The form of an answer: fields of both APIs into grammars, and which texts those match."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvmesh.v1.inference_pb2 import AnswerForm as AnswerFormMessage
from kvmesh.v1.inference_pb2 import GenerateRequest, TextChoices

from services.common.grammars import compile_grammar, grammar_tokenizer
from services.common.models import resolve_model
from services.common.text.model_tokenizer import load_tokenizer
from services.gateway.api.native import generation_request
from services.gateway.api.openai_parse import CHAT, COMPLETIONS, parse_openai
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.grammars.formats import choice_form, grammar_form, regex_form
from services.gateway.request import AnswerForm, check_request
from services.gateway.text.text_model import TextModel

MODEL, VOCAB = "smollm2-135m", 49152


def parsed(endpoint: str = CHAT, **fields: Any) -> AnswerForm | None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "hi"}
    request, _ = parse_openai(endpoint, json.dumps({"model": MODEL, **prompt, **fields}).encode())
    check_request(request)
    return request.form


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (regex_form("f", "[0-9]{3}"), "123"),
        (regex_form("f", "^abc$"), "abc"),
        (choice_form("f", ["a\"b/c\n", "ü€🎉"]), "ü€🎉"),
        (choice_form("f", ["a\"b/c\n", "ü€🎉"]), "a\"b/c\n"),
        (grammar_form("f", 'start: "x" N\nN: /[0-9]/'), "x7"),
        (grammar_form("f", 'root ::= "y" [0-9] | "z"'), "y1"),
    ],
)  # fmt: skip
def test_other_forms_match_their_texts_and_no_others(form: AnswerForm, expected: str) -> None:
    loaded = load_tokenizer(resolve_model(MODEL))
    tokenizer = grammar_tokenizer(loaded.tokenizer, loaded.eos_token_ids, VOCAB)
    matcher = compile_grammar(tokenizer, form.grammar)
    tokens = loaded.tokenizer.encode(expected, add_special_tokens=False).ids
    assert matcher.deep_copy().validate_tokens(tokens) == len(tokens)
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()
    other = loaded.tokenizer.encode("?", add_special_tokens=False).ids
    assert compile_grammar(tokenizer, form.grammar).validate_tokens(other) == 0


def test_the_grammars_tokenizer_reads_tokens_as_answers_do(text_model: TextModel) -> None:
    tokenizer = grammar_tokenizer(text_model.tokenizer, text_model.eos_token_ids, VOCAB + 64)
    for token, raw in enumerate(text_model.vocabulary.token_bytes):
        assert not raw or tokenizer.decode_bytes([token]) == raw
        assert tokenizer.is_special_token(token) is (not raw)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_every_field_for_the_form_is_read(endpoint: str) -> None:
    free = parsed(endpoint, response_format={"type": "text"})
    assert free is None
    named = {"name": "n", "schema": SCHEMA, "strict": True}
    forms = [
        parsed(endpoint, response_format={"type": "json_schema", "json_schema": named}),
        parsed(endpoint, guided_json=SCHEMA),
        parsed(endpoint, guided_json=json.dumps(SCHEMA)),
        parsed(endpoint, structured_outputs={"json": SCHEMA}),
    ]
    assert len({form.grammar for form in forms if form is not None}) == 1
    for given in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'start: "a"'},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
    ):
        form = parsed(endpoint, **given)
        assert form is not None
        assert form.field.startswith(next(iter(given)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 3}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["x"] * 1001}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_forms_that_make_no_sense(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_structural_tags_are_named_as_unsupported() -> None:
    with pytest.raises(UnsupportedParameter):
        parsed(structured_outputs={"structural_tag": "{}"})


@pytest.mark.parametrize(
    ("form", "same"),
    [
        (AnswerFormMessage(json_schema=json.dumps(SCHEMA)), {"guided_json": SCHEMA}),
        (AnswerFormMessage(json_object=True), {"response_format": {"type": "json_object"}}),
        (AnswerFormMessage(regex="a+"), {"guided_regex": "a+"}),
        (AnswerFormMessage(choices=TextChoices(texts=["a", "b"])), {"guided_choice": ["a", "b"]}),
        (AnswerFormMessage(grammar='start: "a"'), {"guided_grammar": 'start: "a"'}),
    ],
)
def test_native_forms_are_those_of_the_other_api(form: AnswerFormMessage, same: dict[str, Any]) -> None:
    native = generation_request(GenerateRequest(model=MODEL, text="hi", form=form)).form
    other = parsed(**same)
    assert native is not None
    assert other is not None
    assert native.grammar == other.grammar


def test_an_empty_native_form_is_an_error() -> None:
    with pytest.raises(InvalidRequest):
        generation_request(GenerateRequest(model=MODEL, text="hi", form=AnswerFormMessage()))
