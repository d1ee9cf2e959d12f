"""The official `openai` client, unmodified, against the running mesh."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest

from tests.support.mesh import MODEL, Mesh

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **options})


def test_chat_answers_in_a_sentence(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_stream_concatenates_to_the_unary_answer(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason is not None
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_usage_is_the_last_chunk(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_wire_format(mesh: Mesh) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "stream": True}
    request = Request(
        f"{mesh.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=120) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        assert response.headers["x-kvmesh-worker"].startswith("worker")
        assert int(response.headers["x-kvmesh-cached-tokens"]) >= 0
        assert len(response.headers["traceparent"].split("-")) == 4
        events = [event for event in response.read().decode().split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])


def test_two_choices(client: openai.OpenAI) -> None:
    answer = ask(client, n=2, temperature=1.0, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens <= 48
    streamed = {0: "", 1: ""}
    for chunk in ask(client, n=2, temperature=1.0, seed=11, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == {choice.index: choice.message.content for choice in answer.choices}


def test_seed_repeats_and_differs(client: openai.OpenAI) -> None:
    first, again, other = (ask(client, temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("stop", ["Paris", ["zebra", "Paris"], "capital of France is Paris"])
def test_stop_ends_before_the_string(client: openai.OpenAI, stop: Any) -> None:
    answer = ask(client, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    text = answer.choices[0].message.content
    assert "Paris" not in text
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stop=stop, stream=True))
    assert streamed == text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-4)
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed = [
        entry.logprob
        for chunk in ask(client, logprobs=True, top_logprobs=3, max_tokens=5, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.logprob for entry in content]


def test_completions_logprobs_and_offsets(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4, temperature=0, logprobs=2)
    arrays = answer.choices[0].logprobs
    assert arrays is not None
    assert "".join(arrays.tokens or []) == answer.choices[0].text
    lengths = {
        len(array or []) for array in (arrays.tokens, arrays.token_logprobs, arrays.top_logprobs, arrays.text_offset)
    }
    assert lengths == {4}


def test_completions_of_lists_and_token_ids(client: openai.OpenAI) -> None:
    single = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=6, temperature=0)
    several = client.completions.create(
        model=MODEL, prompt=["The sky is", "One, two,"], max_tokens=6, temperature=0, n=2
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == single.choices[0].text
    by_ids = client.completions.create(model=MODEL, prompt=[504, 2, 260], max_tokens=3, temperature=0, echo=True)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 3


def test_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=3, temperature=0, echo=True)
    assert answer.choices[0].text.startswith("The sky is")


def test_ignore_eos_runs_to_the_limit(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=80, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 80
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


def test_logit_bias_forbids_and_forces(client: openai.OpenAI) -> None:
    forced = client.completions.create(
        model=MODEL, prompt="The sky is", max_tokens=3, temperature=0, logit_bias={"260": 100}, logprobs=0
    )
    assert forced.choices[0].logprobs is not None
    assert len(set(forced.choices[0].logprobs.tokens or [])) == 1


def test_penalties_change_the_text(client: openai.OpenAI) -> None:
    prompt = "la la la la la la la la"
    texts = {
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, extra_body=extra)
        .choices[0]
        .text
        for extra in ({}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.8})
    }
    assert len(texts) > 1


def test_models(client: openai.OpenAI, mesh: Mesh) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    model = client.models.retrieve(MODEL)
    extra = (model.model_extra or {})["kvmesh"]
    assert extra["context_length"] > 0
    assert extra["dtype"] in ("bfloat16", "float32")
    assert len(extra["digest"]) == 32
    assert extra["weight_format"] == "gguf:Q4_1,Q8_0"
    for path in ("/healthz", "/readyz"):
        with urlopen(mesh.url + path, timeout=30) as response:
            assert response.status == 200


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, model="nobody")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_long_prompt_is_a_context_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert error.value.code == "context_length_exceeded"


def test_stream_can_be_closed_early(client: openai.OpenAI) -> None:
    stream = ask(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_cache_salt_separates(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about salt. " * 20}]

    def cached(salt: str) -> int:
        answer = ask(client, messages=messages, max_tokens=1, extra_body={"cache_salt": salt})
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert cached("first") == 0
    assert cached("first") > 0
    assert cached("second") == 0
