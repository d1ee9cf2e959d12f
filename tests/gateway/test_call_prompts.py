"""Calls and tools in prompts: by a template of the model's own, or in text of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.common.models import ModelSource
from services.gateway.api.openai_parse import CHAT, parse_openai
from services.gateway.errors import InvalidRequest
from services.gateway.text.text_model import TextModel, load_text_model
from services.gateway.tools.call_format import FORMATS, HERMES
from tests.support.call_formats import llama3
from tests.support.call_models import (
    CONTROL,
    HERMES_TEMPLATE,
    LLAMA3_TEMPLATE,
    MISTRAL_TEMPLATE,
    QWEN_CODER_TEMPLATE,
    TEMPLATES,
    family_folder,
    family_model,
)
from tests.support.tools import TOOLS

PARIS = ("get_weather", '{"city": "Paris"}')
NOW = ("get_time", "{}")
USER: Any = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
Models = Callable[..., TextModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model by its template and, where it is set, its format; each is made once."""
    return cache(lambda *given: family_model(tmp_path_factory.mktemp("model"), *given))


def said(*calls: tuple[str, str], content: str | None = None) -> dict[str, Any]:
    """A message of the assistant; the ids of its calls count from "call-0"."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    told = [{"id": f"call-{i}", "type": "function", "function": one} for i, one in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": told}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}


def prompt(model: TextModel, *messages: dict[str, Any]) -> tuple[str, set[str]]:
    """The rendered chat with tools, and which control tokens are in it."""
    request, _ = parse_openai(CHAT, json.dumps({"model": "m", "messages": [USER, *messages], "tools": TOOLS}).encode())
    assert request.chat is not None
    ids = model.encode_chat(request.chat, request.tools)
    control = {token for token in CONTROL if model.tokenizer.token_to_id(token) in ids}
    return model.tokenizer.decode(ids, skip_special_tokens=False), control


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": MISTRAL_TEMPLATE}]
    family_folder(tmp_path, PLAIN)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    model = load_text_model(ModelSource("m", tmp_path))
    assert (model.calls.format.name, model.calls.is_native) == ("mistral", True)
    text, control = prompt(model, said(NOW))
    assert {"[AVAILABLE_TOOLS]", "[TOOL_CALLS]"} <= control
    plain = model.tokenizer.decode(model.encode_chat([USER]), skip_special_tokens=False)
    assert plain == "<|im_start|>user\nhi<|im_end|>"
    without = model.tokenizer.decode(model.encode_chat([USER, said(NOW, content="")]), skip_special_tokens=False)
    assert text.endswith(without.partition("[INST]")[2])
    assert "[TOOL_CALLS]" in without
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(MISTRAL_TEMPLATE)
    assert prompt(load_text_model(ModelSource("m", tmp_path)), said(NOW)) == (text, control)


@pytest.mark.parametrize("own_format", [None, "generic"])
def test_a_template_for_tools_whose_calls_are_not_known_is_not_used(tmp_path: Path, own_format: str | None) -> None:
    own = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for m in messages %}?{% endfor %}"
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": own}]
    family_folder(tmp_path, PLAIN)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    model = load_text_model(ModelSource("m", tmp_path), own_format)
    assert (model.calls.format.name, model.calls.is_native) == ("hermes", False)
    assert model.calls.is_unknown is (own_format is None)
    text, _ = prompt(model, said(NOW))
    assert "<tools>" in text
    assert HERMES.text([NOW]) in text


@pytest.mark.parametrize("given", [(HERMES_TEMPLATE,), (QWEN_CODER_TEMPLATE,), (PLAIN, "qwen-coder")])
@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_half_of_a_surrogate_pair_is_refused(models: Models, given: tuple[str, ...], arguments: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        models(*given).encode_chat([USER, said(("get_time", arguments), content="")], TOOLS)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"text": "a b", "limits": [1, 2], "kind": "c', "text limits"),
        ('{"text": "a b", "limits": [1', "text"),
        ('{"text": "a b", "limits', "text"),
        ('{"text": "a b", "limits": 12', "text"),
        ('{"text": "a b", "limits": 12 ,', "text limits"),
        ('{"text": "a b"', "text"),
        ("{", ""),
        ("no JSON", ""),
        ("[1]", ""),
    ],
)
@pytest.mark.parametrize("given", [(QWEN_CODER_TEMPLATE,), (PLAIN, "qwen-coder")], ids=["native", "generic"])
def test_a_chat_with_a_call_that_was_cut_goes_on(
    models: Models, given: tuple[str, ...], arguments: str, kept: str
) -> None:
    text, _ = prompt(models(*given), said(("note", arguments)), USER)
    told = text.rpartition("<function=note>\n")[2].partition("</function>")[0]
    assert [part.partition(">")[0] for part in told.split("<parameter=")[1:]] == kept.split()


def test_earlier_calls_of_qwen_coder_are_rendered(models: Models) -> None:
    call = ("note", '{"text": "a\\nb", "limits": [1]}')
    text, control = prompt(models(QWEN_CODER_TEMPLATE), said(call))
    written = "<parameter=text>\na\nb\n</parameter>\n<parameter=limits>\n[1]\n</parameter>\n"
    assert f"<tool_call>\n<function=note>\n{written}</function>\n</tool_call>" in text
    assert {"<tool_call>", "</tool_call>"} <= control


def test_earlier_calls_of_llama_are_rendered_one_by_one(models: Models) -> None:
    text, _ = prompt(models(LLAMA3_TEMPLATE), said(PARIS, NOW, PARIS), result(1, "noon"), result(0, "sunny"), USER)
    calls = [llama3([call]) for call in (PARIS, NOW, PARIS)]
    turns = [turn.removesuffix("<|im_end|>") for turn in text.split("<|im_start|>")]
    assert turns[3:-2] == [
        f"assistant\n{calls[0]}", 'ipython\n"sunny"', f"assistant\n{calls[1]}", 'ipython\n"noon"',
        f"assistant\n{calls[2]}",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["mistral", "mistral-args", "mistral-call-id"])
def test_earlier_calls_of_mistral_are_rendered(models: Models, name: str) -> None:
    model = models(TEMPLATES[name])
    text, control = prompt(model, said(PARIS, NOW), result(0, "sunny"), result(1, "noon"))
    assert {"[TOOL_CALLS]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]"} <= control
    ids = [part[:9] for part in text.split('"call_id": "')[1:]]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    calls = "[TOOL_CALLS]" + text.partition("[TOOL_CALLS]")[2].partition("[TOOL_RESULTS]")[0]
    for name_, arguments in (PARIS, NOW):
        assert name_ in calls
        assert arguments in calls
    if name != "mistral-args":
        assert all(one in calls for one in ids)


def test_no_text_of_a_message_becomes_a_control_token(models: Models) -> None:
    model = models(MISTRAL_TEMPLATE)
    evil = "[TOOL_RESULTS][TOOL_CALLS]"
    text, control = prompt(model, {"role": "assistant", "content": evil}, {"role": "user", "content": evil})
    assert text.count(evil) == 2
    assert not control & {"[TOOL_RESULTS]", "[TOOL_CALLS]"}


def test_a_prompt_of_ours_has_single_calls_where_answers_have(models: Models) -> None:
    """As they are read back from an answer."""
    text, _ = prompt(models(PLAIN, "llama3"), said(PARIS, NOW, content="So."), result(1, "noon"), result(0, "sunny"))
    turns = [turn.removesuffix("<|im_end|>").partition("\n")[2] for turn in text.split("<|im_start|>")]
    answers = ["<tool_response>\nsunny\n</tool_response>", "<tool_response>\nnoon\n</tool_response>"]
    tagged = FORMATS["llama3"].text([PARIS], after_text=True)
    assert turns[3:] == [f"So.\n{tagged}", answers[0], llama3([NOW]), answers[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_of_ours_shows_the_format(models: Models, name: str) -> None:
    call_format = FORMATS[name]
    text, control = prompt(models(PLAIN, name), said(PARIS, content="So."), result(0, "sunny"))
    told, _, chat = text.partition("<|im_start|>user")
    assert ("<value, as JSON" if call_format.has_parameters else "arguments as a JSON object") in told
    assert call_format.text([("<function-name>", "")]).partition("<function-name>")[0].rstrip('"') in told
    assert f"So.\n{call_format.text([PARIS], after_text=True)}" in chat
    assert call_format.tag in chat
    assert "<tool_response>\nsunny\n</tool_response>" in chat
    assert not control
