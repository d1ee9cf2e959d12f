"""Parsing of OpenAI bodies: what is accepted, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.openai_parse import CHAT, COMPLETIONS, parse_openai
from services.gateway.errors import InvalidRequest, UnsupportedParameter
from services.gateway.request import GenerationRequest, check_request

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> GenerationRequest:
    request, _ = parse_openai(CHAT, json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    check_request(request)
    return request


def completion(**fields: Any) -> GenerationRequest:
    request, _ = parse_openai(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    check_request(request)
    return request


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', None),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b"[" * 100_000, None),
        (b'{"model": "m", "messages": [], "x": ' + b"[" * 100_000, None),
        (b'{"model": 1, "messages": []}', "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"model": "m", "messages": [], "temperature": NaN}', None),
        (b'{"model": "m", "messages": [], "max_tokens": "5"}', "max_tokens"),
        (b'{"model": "m", "messages": [], "max_tokens": 1.5}', "max_tokens"),
        (b'{"model": "m", "messages": [], "stream": "yes"}', "stream"),
    ],
)
def test_malformed_bodies(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_openai(CHAT, body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": "urgent"}, "priority"),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("prediction", {}),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("min_tokens", 3),
    ],
)
def test_known_fields_without_implementation(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{name: value})
    assert caught.value.param == name
    chat(**{name: None})


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_parts_other_than_text(part: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert caught.value.param == "messages[0].content[1]"


def test_neutral_values_and_unknown_fields_are_accepted() -> None:
    chat(
        tools=[], tool_choice="auto", response_format={"type": "text"}, parallel_tool_calls=True, store=False,
        metadata={}, service_tier="auto", modalities=["text"], my_own_field={"x": 1}, user="u", logit_bias=None,
    )  # fmt: skip
    completion(suffix="", best_of=2, n=2)


def test_completion_refusals() -> None:
    for fields, param in (
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            completion(**fields)
        assert caught.value.param == param


def test_prompt_forms() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


def test_roles_names_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "n"}])
    assert request.chat == [{"role": "system", "content": "d"}, {"role": "user", "content": "ab", "name": "n"}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "messages", "prompt", "stop", "n", "seed", "logit_bias", "logprobs", "stream_options", "temperature", "model",
    "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6), st.sampled_from([CHAT, COMPLETIONS]))
def test_any_value_is_parsed_or_refused(fields: dict[str, Any], endpoint: str) -> None:
    body = {"model": "m", "messages": [USER], "prompt": "hi", **fields}
    try:
        request, _ = parse_openai(endpoint, json.dumps(body).encode())
        check_request(request)
    except InvalidRequest:
        pass


@given(st.binary(max_size=60), st.sampled_from([CHAT, COMPLETIONS]))
def test_any_bytes_are_parsed_or_refused(body: bytes, endpoint: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_openai(endpoint, body)


def test_class_and_objectives_of_a_request() -> None:
    def parsed(**fields: Any) -> GenerationRequest:
        return parse_openai(COMPLETIONS, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())[0]

    assert parsed().priority == 0
    assert [parsed(priority=name).priority for name in ("interactive", "standard", "batch")] == [1, 2, 3]
    tiers = ("auto", "default", "priority", "flex")
    assert [parsed(service_tier=name).priority for name in tiers] == [0, 0, 1, 3]
    mine = parsed(kvmesh={"ttft_s": 1.5, "tpot_s": 0.1, "priority": "batch"}, service_tier="flex")
    assert (mine.ttft_s, mine.tpot_s, mine.priority) == (1.5, 0.1, 3)
    for wrong, param in (
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": "flex", "priority": "interactive"}, "service_tier"),
        ({"kvmesh": {"ttft": 1}}, "kvmesh"),
        ({"kvmesh": {"ttft_s": "soon"}}, "kvmesh.ttft_s"),
        ({"kvmesh": {"priority": "urgent"}}, "kvmesh.priority"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parsed(**wrong)
        assert caught.value.param == param
    for bad in (-1, float("inf"), 1e9):
        with pytest.raises(InvalidRequest, match="ttft_s"):
            check_request(GenerationRequest(model="m", prompts=["hi"], ttft_s=bad))
