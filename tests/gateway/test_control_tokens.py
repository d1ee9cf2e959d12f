"""Calls between control tokens, over real gRPC, from scripted workers of a model of each family."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1.inference_pb2 import ListModelsRequest

from tests.gateway.conftest import Mesh, running_mesh
from tests.gateway.test_tool_calls import calls_of, whole
from tests.support.call_formats import WRITERS, llama3
from tests.support.call_models import TEMPLATES, family_model

PARIS = ("get_weather", '{"city": "Paris"}')
NOW = ("get_time", "{}")
NAMED = f"{PARIS[0]}{PARIS[1]} {NOW[0]}{NOW[1]}"


@pytest_asyncio.fixture(params=sorted(TEMPLATES))
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mesh]:
    """A gateway with a model of each family, and scripted workers."""
    model = family_model(tmp_path, TEMPLATES[request.param])
    async with running_mesh(model, models=(f"smollm2-135m={tmp_path}",)) as mesh:
        yield mesh


@pytest.mark.asyncio
async def test_calls_between_control_tokens_are_read(family: Mesh) -> None:
    """In a whole answer and its stream, whole and wherever it is cut."""
    call_format = family.text.calls.format
    calls = [PARIS] if call_format.is_single else [PARIS, NOW]
    write = next(write for one, write in WRITERS if one is call_format and write is not llama3)
    answer = f"So:\n{write(calls)}"
    family.say(answer)
    (choice,) = await whole(family, logprobs=True)
    assert choice["message"]["content"] == "So:"
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == "tool_calls"
    shown = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
    assert shown == answer
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(call["id"], {"pattern": "^[a-z0-9]{9}$" if call_format.has_short_ids else "^call_"})
    tokens = family.text.encode_text(answer)
    for end in range(1, len(tokens), 3):
        (choice,) = await whole(family, max_tokens=end)
        message = choice["message"]
        cut = family.text.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        if "tool_calls" not in message:
            assert message["content"] == cut
            continue
        # Beside the text before the calls only what was to become one.
        assert message["content"].startswith("So:")
        assert cut.endswith(message["content"].removeprefix("So:"))
        shown_calls = [_said_of(call) for call in message["tool_calls"]]
        if call_format.has_parameters:
            _check_parameters(cut, shown_calls)
        else:
            begun = [(name, said, len(cut) - answer.index(said)) for name, said in calls]
            assert shown_calls == [(name, said[:length]) for name, said, length in begun if length > 0]
    # Without tools a control token has no text.
    family.say(answer)
    (plain,) = (await family.chat())["choices"]
    control = family.text.calls.control
    assert control
    assert not any(token in plain["message"]["content"] for token in control)


def _check_parameters(cut: str, shown_calls: list[tuple[str, str]]) -> None:
    # Of a value that may have come to its end its likeness is given, too.
    assert all(f"{name}{arguments}".partition("\n")[0] in NAMED for name, arguments in shown_calls)
    city = cut.partition("<parameter=city>\n")[2].partition("\n")[0]
    assert city in shown_calls[0][1]


def _said_of(call: dict[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], call["function"]["arguments"]


@pytest.mark.asyncio
async def test_models_tell_their_format(family: Mesh) -> None:
    (model,) = json.loads((await family.openai.ListModels(Empty())).data)["data"]
    assert model["kvmesh"]["call_format"] == family.text.calls.format.name
    (told,) = (await family.native.ListModels(ListModelsRequest())).models
    assert told.call_format == family.text.calls.format.name
