"""Answers that keep to a form, by the official client from the real model, also when a worker dies in the middle."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.mesh import MODEL, Mesh, total
from tests.support.schemas import REFUSED, SCHEMAS, record

QUESTION: Any = [{"role": "user", "content": "Tell me about a person, in JSON."}]
# Longer answers than this are cut: those of recursive schemas, and numbers, may go on for ever.
MAX_TOKENS = 200
# Of times the library takes fractions of six digits at most.
FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4", "email"))


def form(schema: dict[str, Any]) -> dict[str, Any]:
    """The `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **options})


async def answers(mesh: Mesh, schemas: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The first choice for each schema, eight at a time."""
    turns = asyncio.Semaphore(8)
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=3, timeout=120) as client:

        async def one(schema: dict[str, Any]) -> Any:
            async with turns:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=QUESTION, max_tokens=MAX_TOKENS, response_format=form(schema), **options
                )
                return answer.choices[0]

        return dict(zip(schemas, await asyncio.gather(*map(one, schemas.values())), strict=True))


async def test_every_finished_answer_validates(mesh: Mesh) -> None:
    choices = await answers(mesh, SCHEMAS, temperature=0.8, seed=3)
    finished = {name: choice.message.content for name, choice in choices.items() if choice.finish_reason == "stop"}
    for name, text in finished.items():
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=FORMATS)
    assert len(finished) >= 45, choices.keys() - finished.keys()


@pytest.mark.parametrize("name", ["deep", "no such type"])
def test_what_cannot_be_promised_is_refused_at_once(client: openai.OpenAI, name: str) -> None:
    schema, place = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=form(schema))
    assert place in caught.value.message
    assert caught.value.param == "response_format.json_schema.schema"


def test_choices_streams_and_logprobs_agree(client: openai.OpenAI) -> None:
    schema = record(name={"type": "string", "maxLength": 30}, age={"type": "integer", "minimum": 0, "maximum": 120})
    options: Any = {"response_format": form(schema), "n": 2, "temperature": 1.0, "seed": 5, "logprobs": True}
    whole = ask(client, top_logprobs=5, **options)
    texts, logprobs = {0: "", 1: ""}, {0: [], 1: []}  # type: ignore[var-annotated]
    for chunk in ask(client, top_logprobs=5, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert texts[0] != texts[1]
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content), schema)
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content
        # What the grammar forbids is not among the alternatives.
        first = choice.logprobs.content[0]
        assert all(top.token.strip().startswith("{") or not top.token.strip() for top in first.top_logprobs)


def test_other_forms_and_stop_strings(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt="The number is", max_tokens=40, temperature=1, seed=1, extra_body=extra
        ).choices[0]

    assert re.fullmatch("[0-9]{3}-[0-9]{2}", complete(guided_regex="[0-9]{3}-[0-9]{2}").text)
    assert complete(guided_choice=["forty-two", "seven"]).text in ("forty-two", "seven")
    assert re.fullmatch("(ab)+c", complete(structured_outputs={"grammar": 'start: "ab"+ "c"'}).text)
    cut = complete(guided_regex="[0-9]{3}-[0-9]{2}", stop=["-"])
    assert re.fullmatch("[0-9]{3}", cut.text)
    assert cut.finish_reason == "stop"


def rescues(mesh: Mesh) -> float:
    """Attempts that have gone on elsewhere."""
    samples = (mesh.metrics(entry["name"]) for entry in mesh.of_kind("gateway"))
    return sum(total(one, "kvmesh_gateway_rescues_total") for one in samples)


def test_an_answer_whose_worker_dies_goes_on_as_it_would_have(mesh: Mesh, client: openai.OpenAI) -> None:
    item = record(title={"type": "string", "maxLength": 20}, text={"type": "string", "minLength": 60, "maxLength": 80})
    schema = {"type": "array", "items": item, "minItems": 2, "maxItems": 2}
    options: Any = {"response_format": form(schema), "n": 2, "temperature": 1.0, "seed": 17}
    calm = {choice.index: choice.message.content for choice in ask(client, **options).choices}
    before = rescues(mesh)
    # On a machine that is busy enough the answer may be complete before its reader has come to the kill.
    for _ in range(5):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=QUESTION, max_tokens=MAX_TOKENS, stream=True, **options
        )
        worker, texts, has_died = answer.headers["x-kvmesh-worker"], {0: "", 1: ""}, False
        for chunk in answer.parse():
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            if not has_died and min(map(len, texts.values())) > 20:
                has_died = True
                mesh.kill(worker)
        mesh.wait_ready(within_s=120)
        assert has_died
        assert texts == calm
        if rescues(mesh) > before:
            return
    raise AssertionError("every answer was complete before its worker had died")
