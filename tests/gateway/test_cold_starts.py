"""Models that are loaded when they are asked for, and other names of models, through a whole gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1.inference_pb2 import TokenizeRequest
from kvmesh.v1.openai_pb2 import GetModelRequest
from kvmesh.v1.router_pb2 import REFUSAL_REASON_TOO_LARGE, Refusal

from services.gateway.load_times import LEAST_S, LoadTimes
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import Mesh, running_mesh
from tests.gateway.fakes import served_model
from tests.support.waiting import eventually

MODEL = "smollm2-135m"
BODY = {"model": MODEL, "prompt": "hi"}


@asynccontextmanager
async def cold_mesh(text: TextModel, **settings: Any) -> AsyncIterator[Mesh]:
    """A gateway whose one model is loaded on demand, and a router that knows no worker of it."""
    async with running_mesh(text, on_demand_models=(MODEL,), **settings) as mesh:
        await unload(mesh)
        yield mesh
        mesh.router.set_models(served_model())
        await mesh.wait_idle()


async def unload(mesh: Mesh) -> None:
    mesh.router.set_models()
    await eventually(lambda: not mesh.gateway.core.catalog.serves(MODEL))


async def wanted(mesh: Mesh, requests: int) -> None:
    """Wait until the router has heard that so many requests want the model."""

    def told() -> int:
        last = mesh.router.queues[-1].waiting if mesh.router.queues else []
        return sum(one.requests for one in last if one.model == MODEL)

    await eventually(lambda: told() == requests)


async def listed(mesh: Mesh) -> dict[str, dict[str, Any]]:
    data = json.loads((await mesh.openai.ListModels(Empty())).data)["data"]
    return {model["id"]: model["kvmesh"] for model in data}


async def test_requests_wait_for_the_load_are_told_the_forecast_and_routers_hear_of_them(
    text_model: TextModel,
) -> None:
    async with cold_mesh(text_model, load_start_s=7.0, load_bytes_per_s=1e15) as mesh:
        assert (await listed(mesh))[MODEL]["state"] == "unloaded"
        call = mesh.openai.Completions(HttpBody(data=json.dumps({**BODY, "stream": True}).encode()))
        await wanted(mesh, 1)
        others = [asyncio.create_task(mesh.complete()) for _ in range(2)]
        await wanted(mesh, 3)
        shown = (await listed(mesh))[MODEL]
        assert shown["state"] == "loading"
        assert shown["cold_start_s"] > 0
        assert not mesh.router.asks
        mesh.router.set_models(served_model())
        headers = dict(await call.initial_metadata())
        assert headers["x-kvmesh-cold-start-s"] == "7.0"
        assert b"".join([message.data async for message in call]).endswith(b"[DONE]\n\n")
        for other in others:
            assert (await other)["choices"]
        await wanted(mesh, 0)
        assert (await listed(mesh))[MODEL]["state"] == "ready"
        warm = mesh.openai.Completions(HttpBody(data=json.dumps(BODY).encode()))
        assert "x-kvmesh-cold-start-s" not in {key for key, _ in await warm.initial_metadata()}
        assert [message async for message in warm]


async def test_beyond_the_bound_and_the_deadline_the_forecast_is_the_time_to_come_back(text_model: TextModel) -> None:
    long: dict[str, Any] = {"max_cold_wait_s": 5000.0, "default_deadline_s": 5000.0, "load_start_s": 1000.0}
    async with cold_mesh(text_model, max_cold_requests=1, load_bytes_per_s=1e15, **long) as mesh:
        code, error, trailing = await mesh.error("Completions", BODY, timeout=100)
        assert (code, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_loading")
        assert trailing["retry-after"] in ("1000", "1001")
        # It is loaded all the same: whoever comes back finds it.
        await wanted(mesh, 1)
        waits = asyncio.create_task(mesh.complete())
        await eventually(lambda: mesh.gateway.core.cold.num_waiting == 1)
        code, error, trailing = await mesh.error("Completions", BODY)
        assert (code, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_loading")
        assert 1 <= int(trailing["retry-after"]) <= 1001
        code, error, _ = await mesh.error("Completions", {**BODY, "model": "nobody"})
        assert (code, error["code"]) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
        mesh.router.set_models(served_model())
        assert (await waits)["choices"]


async def test_a_wait_that_is_longer_than_forecast_ends(text_model: TextModel) -> None:
    async with cold_mesh(text_model, max_cold_wait_s=2.0, load_start_s=1.0, load_bytes_per_s=1e15) as mesh:
        code, error, trailing = await mesh.error("Completions", BODY)
        assert (code, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_loading")
        assert int(trailing["retry-after"]) >= 1


async def test_a_client_that_leaves_gives_its_place_back(text_model: TextModel) -> None:
    async with cold_mesh(text_model, max_cold_requests=1) as mesh:
        call = mesh.openai.Completions(HttpBody(data=json.dumps(BODY).encode()))
        await eventually(lambda: mesh.gateway.core.cold.num_waiting == 1)
        call.cancel()
        await eventually(lambda: mesh.gateway.core.cold.num_waiting == 0)
        assert mesh.gateway.core.admission.total == 0


async def test_a_model_that_goes_as_a_request_comes_is_waited_for(text_model: TextModel) -> None:
    async with running_mesh(text_model, on_demand_models=(MODEL,)) as mesh:
        # The router knows of no worker any more and has not said so.
        mesh.router.unstaffed.add(served_model().digest)
        request = asyncio.create_task(mesh.complete())
        await eventually(lambda: mesh.router.asks)
        await unload(mesh)
        await wanted(mesh, 1)
        mesh.router.unstaffed.clear()
        mesh.router.set_models(served_model())
        assert (await request)["choices"]
        await mesh.wait_idle()


async def test_a_request_that_no_worker_can_have_is_refused_though_its_model_serves(text_model: TextModel) -> None:
    async with running_mesh(text_model, on_demand_models=(MODEL,)) as mesh:
        # No room for it anywhere, which no load would change.
        mesh.router.unstaffed.add(served_model().digest)
        code, error, _ = await mesh.error("Completions", BODY, timeout=30)
        assert (code, error["code"]) == (grpc.StatusCode.UNAVAILABLE, "model_unavailable")
        assert 1 < len(mesh.router.asks) <= 20
        mesh.router.unstaffed.clear()
        mesh.router.asks.clear()
        # The router says as much, so that it is asked but once.
        mesh.router.refusal = Refusal(reason=REFUSAL_REASON_TOO_LARGE, retry_after_s=0.01)
        assert (await mesh.error("Completions", BODY, timeout=30))[0] == grpc.StatusCode.UNAVAILABLE
        assert len(mesh.router.asks) == 1
        mesh.router.refusal = None
        assert (await mesh.complete())["choices"]
        await mesh.wait_idle()


async def test_texts_are_tokenised_without_a_worker(text_model: TextModel) -> None:
    async with cold_mesh(text_model) as mesh:
        answer = await mesh.native.Tokenize(TokenizeRequest(model=MODEL, text="hi there"))
        assert list(answer.token_ids) == text_model.encode_text("hi there")


async def test_aliases_and_the_default_model(text_model: TextModel) -> None:
    async with running_mesh(text_model) as mesh:
        catalog = mesh.gateway.core.catalog
        body: dict[str, Any] = {"prompt": "hi"}
        for nameless in (body, {**body, "model": ""}):
            code, error, _ = await mesh.error("Completions", nameless)
            assert (code, error["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        code, error, _ = await mesh.error("Embeddings", {"input": "hi"})
        assert (code, error["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        # A model's own name goes before an alias.
        mesh.router.set_aliases({"": MODEL, "best": MODEL, MODEL: "nobody", "lost": "nobody"})
        await eventually(lambda: len(catalog.aliases) == 4)
        for named in (body, {**body, "model": "best"}, {**body, "model": MODEL}):
            assert json.loads(await mesh.post("Completions", named))["model"] == MODEL
        assert json.loads(await mesh.post("Embeddings", {"input": "hi"}))["model"] == MODEL
        code, error, _ = await mesh.error("Completions", {**body, "model": "lost"})
        assert (code, error["code"]) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
        shown = await listed(mesh)
        assert {name: model["alias_of"] for name, model in shown.items()} == {MODEL: None, "best": MODEL}
        one = json.loads((await mesh.openai.GetModel(GetModelRequest(id="best"))).data)
        assert (one["id"], one["kvmesh"]["state"]) == ("best", "ready")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.openai.GetModel(GetModelRequest(id="lost"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        mesh.router.set_aliases({})
        await eventually(lambda: not catalog.aliases)
        code, _, _ = await mesh.error("Completions", {**body, "model": "best"})
        assert code == grpc.StatusCode.NOT_FOUND


@given(st.lists(st.floats(0.1, 500.0), max_size=20), st.floats(0.0, 1000.0))
def test_forecasts_follow_the_loads_and_never_run_out(loads: list[float], passed_s: float) -> None:
    times = LoadTimes({"m": 10**9}, bytes_per_s=1e8, start_s=2.0)
    assert times.whole_s("m") == 12.0
    for seconds in loads:
        times.learn("m", seconds)
    if loads:
        assert min(loads) <= times.whole_s("m") <= max(loads)
        assert abs(times.whole_s("m") - loads[-1]) <= max(loads) / 2 or len(loads) == 1
    assert LEAST_S <= times.left_s("m", passed_s) <= max(LEAST_S, times.whole_s("m"), passed_s / 4)
