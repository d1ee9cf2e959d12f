"""What is asked of prompts themselves, by the official client through Envoy: embeddings, log probabilities."""

from __future__ import annotations

import math

import openai

from tests.support.mesh import MODEL

TEXTS = ["The cat sleeps.", "A cat is asleep.", "Interest rates rose by half a point."]


def test_embeddings(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = [one.embedding for one in reply.data]
    assert [len(vector) for vector in vectors] == [576] * 3
    assert all(math.isclose(math.hypot(*vector), 1.0, abs_tol=1e-4) for vector in vectors)
    again = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float", dimensions=64)
    norm = math.hypot(*vectors[1][:64])
    assert all(
        math.isclose(one, other / norm, abs_tol=1e-5)
        for one, other in zip(again.data[0].embedding, vectors[1][:64], strict=True)
    )
    assert again.usage.prompt_tokens == again.usage.total_tokens > 0


def test_log_probabilities_of_an_echoed_prompt(client: openai.OpenAI) -> None:
    prompt = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0, echo=True, logprobs=1)
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert "".join(told.tokens) == whole.choices[0].text
    assert told.token_logprobs[0] is None
    # The last numbers follow from the first ones, and what is drawn greedily is told as it is of a prompt.
    again = client.completions.create(
        model=MODEL, prompt=whole.choices[0].text, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    scores = (again.choices[0].model_extra or {})["prompt_logprobs"]
    values = [next(iter(one.values()))["logprob"] for one in scores[1:]]
    assert values == told.token_logprobs[1:]
