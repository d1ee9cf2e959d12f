"""Embeddings by the OpenAI API, with scripted workers: formats, batches, dimensions, failures, refusals."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import grpc
import pytest

from services.common.release import SCORE_PROTOCOL
from services.common.rpc import MAX_MESSAGE_BYTES
from tests.gateway.conftest import Mesh
from tests.gateway.fakes import Script, embedding_of, served_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def embed(mesh: Mesh, given: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2-135m", "input": given, **fields}
    value: dict[str, Any] = json.loads(await mesh.post("Embeddings", body))
    return value


async def test_of_one_text(mesh: Mesh) -> None:
    tokens = mesh.text.encode_text("Hello there")
    reply = await embed(mesh, "Hello there")
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": embedding_of(tokens)}],
        "model": "smollm2-135m",
        "usage": {"prompt_tokens": len(tokens), "total_tokens": len(tokens)},
    }
    (request,) = mesh.workers[0].requests
    assert request.embeds
    assert request.max_tokens == 1
    (ask,) = mesh.router.asks
    assert (ask.can_hand_off, ask.block_ids, ask.requires.protocol) == (False, b"", SCORE_PROTOCOL)


async def test_all_of_a_request_come_from_workers_of_one_pooling(mesh: Mesh) -> None:
    def pooling() -> str:
        return mesh.gateway.core.catalog.views["smollm2-135m"][0].view.pooling

    mesh.router.set_models(served_model(pooling="mean"))
    await eventually(lambda: pooling() == "mean", timeout_s=20)
    await embed(mesh, ["one", "two", "three"])
    assert [ask.requires.pooling for ask in mesh.router.asks] == ["mean"] * 3
    await mesh.complete("one")
    assert mesh.router.asks[-1].requires.pooling == "", "who answers needs no embeddings"
    mesh.router.set_models(served_model())
    await eventually(lambda: pooling() == "", timeout_s=20)


async def test_of_many_in_their_order(mesh: Mesh) -> None:
    texts = [f"text {number} " * (1 + number % 7) for number in range(20)]
    reply = await embed(mesh, texts)
    assert [one["index"] for one in reply["data"]] == list(range(20))
    assert [one["embedding"] for one in reply["data"]] == [embedding_of(mesh.text.encode_text(text)) for text in texts]
    assert reply["usage"]["prompt_tokens"] == sum(len(mesh.text.encode_text(text)) for text in texts)


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_of_token_ids(mesh: Mesh, given: Any) -> None:
    reply = await embed(mesh, given)
    prompts = given if isinstance(given[0], list) else [given]
    assert [one["embedding"] for one in reply["data"]] == [embedding_of(prompt) for prompt in prompts]


async def test_in_base64_and_with_fewer_dimensions(mesh: Mesh) -> None:
    plain = (await embed(mesh, [5, 6]))["data"][0]["embedding"]
    packed = (await embed(mesh, [5, 6], encoding_format="base64"))["data"][0]["embedding"]
    assert array("f", base64.b64decode(packed)).tolist() == plain
    two = (await embed(mesh, [5, 6], dimensions=2))["data"][0]["embedding"]
    assert len(two) == 2
    assert sum(value * value for value in two) == pytest.approx(1.0, abs=1e-6)
    assert two[0] / two[1] == pytest.approx(plain[0] / plain[1], rel=1e-5)


async def test_a_reply_that_is_larger_than_a_message(mesh: Mesh) -> None:
    mesh.plan[:] = [Script(repeats=4096)]
    raw = await mesh.post("Embeddings", {"model": "smollm2-135m", "input": ["a text"] * 64})
    assert len(raw) > MAX_MESSAGE_BYTES
    data = json.loads(raw)["data"]
    expected = embedding_of(mesh.text.encode_text("a text")) * 4096
    assert len(data) == 64
    assert all(one["embedding"] == expected for one in data)


async def test_another_worker_computes_what_one_has_lost(mesh: Mesh) -> None:
    expected = await embed(mesh, ["a", "b c"])
    mesh.plan[:] = [Script(fail_after=0), Script(fail_after=0), Script()]
    assert await embed(mesh, ["a", "b c"]) == expected
    await eventually(lambda: len(mesh.workers[1].requests) >= 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [60_000]}, "input"),
        ({"input": [1] * 9000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({}, "input"),
    ],
)
async def test_refusals(mesh: Mesh, fields: dict[str, Any], param: str) -> None:
    code, error, _ = await mesh.error("Embeddings", {"model": "smollm2-135m", **fields})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert error["param"] == param
