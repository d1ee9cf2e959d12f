"""Requests for adapters through a whole gateway: names, what workers and routers are told, whose blocks are whose."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1.router_pb2 import OUTCOME_CANCELLED, ServedAdapter

from services.common.release import ADAPTER_PROTOCOL
from tests.gateway.conftest import ANSWER, Mesh
from tests.gateway.fakes import Script, served_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
BASE = "smollm2-135m"
FIRST, SECOND = (
    ServedAdapter(name=name, model=BASE, digest=name[:1].encode() * 16, rank=8, path=f"/adapters/{name}", created_s=7)
    for name in ("first", "second")
)


async def report(mesh: Mesh, *adapters: ServedAdapter) -> None:
    views = mesh.gateway.core.catalog.views
    mesh.router.set_models(served_model(), adapters=adapters)
    await eventually(lambda: mesh.gateway.core.catalog.views is not views)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def restored(mesh: Mesh) -> AsyncIterator[None]:
    yield
    await report(mesh)


async def complete(mesh: Mesh, model: str) -> None:
    await mesh.complete("Once upon a time there was a request. " * 4, model=model, max_tokens=2)


async def test_an_adapter_is_told_to_router_and_worker_and_has_blocks_of_its_own(mesh: Mesh) -> None:
    await report(mesh, FIRST, SECOND)
    mesh.router.asks.clear()
    for name in (BASE, f"{BASE}:first", f"{BASE}:second", f"{BASE}:first"):
        await complete(mesh, name)
    base, first, second, again = mesh.router.asks
    assert {ask.model for ask in mesh.router.asks} == {BASE}
    assert not base.requires.adapter_digest
    assert (first.requires.adapter_digest, first.requires.adapter_rank) == (FIRST.digest, 8)
    assert first.requires.protocol == ADAPTER_PROTOCOL
    assert len({base.block_ids, first.block_ids, second.block_ids}) == 3
    assert again.block_ids == first.block_ids
    request = mesh.workers[0].requests[-1]
    assert (request.adapter.digest, request.adapter.path) == (FIRST.digest, "/adapters/first")
    await report(mesh, ServedAdapter(name="first", model=BASE, digest=b"x" * 16, rank=8, path="/adapters/first"))
    await complete(mesh, f"{BASE}:first")
    assert mesh.router.asks[-1].block_ids != first.block_ids


async def test_an_alias_goes_with_the_adapters_of_its_model(mesh: Mesh) -> None:
    await report(mesh, FIRST)
    catalog = mesh.gateway.core.catalog
    mesh.router.set_aliases({"best": BASE, "": BASE})
    await eventually(lambda: len(catalog.aliases) == 2, timeout_s=20)
    mesh.router.asks.clear()
    await complete(mesh, "best:first")
    (ask,) = mesh.router.asks
    assert (ask.model, ask.requires.adapter_digest) == (BASE, FIRST.digest)
    for name in ("best:second", ":first", "best:first:first"):
        status, error, _ = await mesh.error("Completions", {"model": name, "prompt": "hi"})
        assert (status.name, error["code"]) == ("NOT_FOUND", "model_not_found"), name
    mesh.router.set_aliases({})
    await eventually(lambda: not catalog.aliases, timeout_s=20)


async def test_adapters_are_listed_with_their_base_and_unknown_ones_are_not_found(mesh: Mesh) -> None:
    await report(mesh, FIRST, ServedAdapter(name="lost", model="nobody's", digest=b"l" * 16, rank=8, path="/l"))
    base, adapter = json.loads((await mesh.openai.ListModels(Empty())).data)["data"]
    assert (base["id"], "parent" in base) == (BASE, False)
    assert (adapter["id"], adapter["parent"], adapter["created"]) == (f"{BASE}:first", BASE, 7)
    shown = adapter["kvmesh"]
    assert (shown["parent"], shown["adapter_digest"], shown["adapter_rank"]) == (BASE, FIRST.digest.hex(), 8)
    assert shown["digest"] == base["kvmesh"]["digest"]
    for name in (f"{BASE}:second", f"{BASE}:", ":first", "nobody's:lost"):
        status, error, _ = await mesh.error("Completions", {"model": name, "prompt": "hi"})
        assert (status.name, error["code"]) == ("NOT_FOUND", "model_not_found"), name


async def test_who_cannot_load_an_adapter_has_not_failed(mesh: Mesh) -> None:
    await report(mesh, FIRST)
    unable = Script(fail_admitted=grpc.StatusCode.FAILED_PRECONDITION)
    mesh.plan[:] = [unable, Script(mesh.text.encode_text(ANSWER))]
    value = await mesh.complete("Once upon a time", model=f"{BASE}:first")
    assert value["choices"][0]["text"] == ANSWER
    mesh.plan[:] = [unable]
    mesh.router.dones.clear()
    status, error, _ = await mesh.error("Completions", {"model": f"{BASE}:first", "prompt": "hi"})
    assert (status, "could not load the adapter" in error["message"]) == (grpc.StatusCode.UNAVAILABLE, True)
    await eventually(lambda: len(mesh.router.dones) == mesh.gateway.core.placement.max_attempts)
    assert {done.outcome for done in mesh.router.dones} == {OUTCOME_CANCELLED}


async def test_a_rescued_answer_goes_on_with_its_adapter(mesh: Mesh) -> None:
    """And only where adapters are served."""
    await report(mesh, FIRST)
    answer = mesh.text.encode_text(ANSWER)
    mesh.plan[:] = [Script(answer, fail_after=2), Script(answer)]
    mesh.router.asks.clear()
    begun = [len(worker.requests) for worker in mesh.workers]
    value = await mesh.complete("Once upon a time", model=f"{BASE}:first")
    assert (value["choices"][0]["text"], value["model"]) == (ANSWER, f"{BASE}:first")
    requests = [one for worker, old in zip(mesh.workers, begun, strict=True) for one in worker.requests[old:]]
    assert sorted(len(one.known) for one in requests) == [0, 1]
    assert all(one.adapter.digest == FIRST.digest and one.adapter.path == FIRST.path for one in requests)
    assert [ask.requires.adapter_digest for ask in mesh.router.asks] == [FIRST.digest] * 2
