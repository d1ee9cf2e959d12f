"""Requests of one public name among its versions, through a whole gateway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from google.protobuf.empty_pb2 import Empty
from kvmesh.v1.router_pb2 import ModelTraffic, VersionShare

from tests.gateway.conftest import Mesh
from tests.gateway.fakes import DIGEST, served_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
NEW = b"n" * 16
OLD_MODEL, NEW_MODEL = served_model(), served_model(digest=NEW, weight_format="gguf:Q8_0")


def traffic(old: int, new: int) -> ModelTraffic:
    shares = [VersionShare(digest=DIGEST, version="v1", weight=old), VersionShare(digest=NEW, version="v2", weight=new)]
    return ModelTraffic(name="smollm2-135m", versions=shares, weighted=bool(old or new))


async def report(mesh: Mesh, *models: object, old: int = 0, new: int = 0) -> None:
    """Have the router report, and wait until the gateway has heard it."""
    views = mesh.gateway.core.catalog.views
    mesh.router.set_models(*models, traffic=traffic(old, new))  # type: ignore[arg-type]
    await eventually(lambda: mesh.gateway.core.catalog.views is not views)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def restored(mesh: Mesh) -> AsyncIterator[None]:
    yield
    mesh.router.unstaffed.clear()
    await report(mesh, served_model())


async def digests(mesh: Mesh, count: int) -> Counter[bytes]:
    """Versions that so many conversations got."""
    mesh.router.asks.clear()
    for number in range(count):
        await mesh.complete(f"Conversation {number}", max_tokens=1)
    return Counter(ask.model_digest for ask in mesh.router.asks)


async def versions(mesh: Mesh) -> list[tuple[str | None, float, int]]:
    (model,) = json.loads((await mesh.openai.ListModels(Empty())).data)["data"]
    return [(one["version"], one["share"], one["ready_replicas"]) for one in model["kvmesh"]["versions"]]


async def test_weights_share_conversations_out_and_each_keeps_its_version(mesh: Mesh) -> None:
    await report(mesh, OLD_MODEL, NEW_MODEL, old=50, new=50)
    first = await digests(mesh, 40)
    assert min(first[DIGEST], first[NEW]) >= 8
    assert await digests(mesh, 40) == first
    assert await versions(mesh) == [("v1", 0.5, 1), ("v2", 0.5, 1)]
    await report(mesh, OLD_MODEL, NEW_MODEL, old=100)
    assert await digests(mesh, 10) == {DIGEST: 10}


async def test_without_weights_replicas_count(mesh: Mesh) -> None:
    await report(mesh, OLD_MODEL, served_model(digest=NEW, ready_replicas=3))
    assert await versions(mesh) == [("v1", 0.25, 1), ("v2", 0.75, 3)]
    await report(mesh, OLD_MODEL, served_model(digest=NEW, ready_replicas=0))
    assert await digests(mesh, 10) == {DIGEST: 10}


async def test_with_weights_an_unregistered_digest_gets_nothing(mesh: Mesh) -> None:
    third = served_model(digest=b"x" * 16, ready_replicas=9)
    await report(mesh, OLD_MODEL, NEW_MODEL, third, old=1, new=1)
    assert b"x" * 16 not in await digests(mesh, 20)
    assert await versions(mesh) == [("v1", 0.5, 1), ("v2", 0.5, 1), (None, 0.0, 9)]


async def test_a_version_without_ready_workers_leaves_its_requests_to_the_others(mesh: Mesh) -> None:
    await report(mesh, OLD_MODEL, served_model(digest=NEW, ready_replicas=0), old=10, new=90)
    assert await digests(mesh, 10) == {DIGEST: 10}
    assert mesh.gateway.core.catalog.unserved == {("smollm2-135m", "v2")}
    await report(mesh, OLD_MODEL, old=10, new=90)
    assert await digests(mesh, 10) == {DIGEST: 10}
    await report(mesh, OLD_MODEL, NEW_MODEL, old=10, new=90)
    assert mesh.gateway.core.catalog.unserved == frozenset()


async def test_a_version_that_has_just_lost_its_workers_costs_no_request(mesh: Mesh) -> None:
    await report(mesh, OLD_MODEL, NEW_MODEL, old=1, new=99)
    mesh.router.unstaffed.add(NEW)
    asked = await digests(mesh, 5)
    assert asked[DIGEST] == 5
    assert asked[NEW] >= 1
    assert mesh.workers[0].requests[-1].model_digest == DIGEST
    mesh.router.unstaffed.add(DIGEST)
    status, error, trailing = await mesh.error("Completions", {"model": "smollm2-135m", "prompt": "hi"})
    assert (status.name, error["code"]) == ("UNAVAILABLE", "model_unavailable")
    assert trailing["retry-after"]


async def test_a_version_with_another_tokenizer_gets_nothing(mesh: Mesh) -> None:
    other = served_model(digest=NEW, tokenizer_digest=b"another tokenize")
    await report(mesh, OLD_MODEL, other, old=50, new=50)
    assert await digests(mesh, 10) == {DIGEST: 10}
    await report(mesh, OLD_MODEL, other, new=100)
    _, error, _ = await mesh.error("Completions", {"model": "smollm2-135m", "prompt": "hi"})
    assert error["message"] == "no worker has a version of the model 'smollm2-135m' that gets traffic"
