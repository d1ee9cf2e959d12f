"""Calls by the real model in other families' formats, which settings name, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from services.common.models import resolve_model
from tests.e2e.test_tools import GET_TIME, QUESTION, ask, checked
from tests.support.mesh import MODEL, running_mesh

# The same model by two names.
OTHER = "other"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    models = ("--model", MODEL, "--model", f"{OTHER}={resolve_model(MODEL).path}")
    env = {"KVMESH_GATEWAY_CALL_FORMATS": f"{MODEL}=llama3,{OTHER}=mistral"}
    options = ("--workers", "2", "--kvstores", "0", *models)
    with (
        running_mesh(tmp_path_factory.mktemp("mesh"), *options, env=env) as mesh,
        openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as made,
    ):
        yield made


@pytest.mark.parametrize("model", [MODEL, OTHER])
def test_calls_that_have_to_be(client: openai.OpenAI, model: str) -> None:
    named = ask(client, model=model, tool_choice=GET_TIME)
    assert checked(named) == ["get_time"]
    required = ask(client, model=model, tool_choice="required", parallel_tool_calls=False)
    assert len(checked(required)) == 1
    assert required.message.content is None
    result: Any = {"role": "tool", "tool_call_id": required.message.tool_calls[0].id, "content": "18 degrees, sunny"}
    chat = [*QUESTION, required.message.to_dict(), result]
    assert ask(client, model=model, messages=chat, tool_choice="none", max_tokens=20).message.content
    assert checked(ask(client, model=model, messages=chat, tool_choice=GET_TIME)) == ["get_time"]


@pytest.mark.parametrize("model", [MODEL, OTHER])
def test_text_and_calls_where_either_may_be(client: openai.OpenAI, model: str) -> None:
    """It calls where it has called before, and talks where it has not."""
    called: list[Any] = []
    for city in ("Rome", "Oslo", "Lima"):
        function = {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}
        called.append({"role": "user", "content": f"What is the weather in {city}?"})
        call = {"id": city, "type": "function", "function": function}
        called.append({"role": "assistant", "content": None, "tool_calls": [call]})
    choice = ask(client, model=model, messages=[*called, *QUESTION], parallel_tool_calls=False)
    assert checked(choice) == ["get_weather"]
    talk = ask(client, model=model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=20)
    assert talk.message.content
    assert talk.message.tool_calls is None
