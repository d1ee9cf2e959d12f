"""Requests with an idempotency key at one gateway, between Valkey and scripted workers that keep nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.router_pb2 import REFUSAL_REASON_NO_WORKER, REFUSAL_REASON_OVERLOADED, Refusal
from kvmesh.v1.worker_pb2 import Admitted, Stale, WorkerGenerateResponse

from services.common.blocks import tenant_tag
from services.common.keys import KeySpace
from services.common.redis_client import RedisClient, connect_redis
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import ANSWER, Mesh, running_mesh
from tests.gateway.fakes import SECRET
from tests.support.valkey import Valkey
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = {"model": "smollm2-135m", "prompt": "hi"}
WINDOW_S = 7.0
# Refills slowly enough for what is read from it.
QUOTA = 12_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Valkey]:
    server = Valkey(Path(tmp_path_factory.mktemp("v")))
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(redis: Valkey) -> AsyncIterator[RedisClient]:
    made = connect_redis(redis.url)
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(redis: Valkey, text_model: TextModel, tmp_path_factory: Any) -> AsyncIterator[Mesh]:
    tenants = Path(tmp_path_factory.mktemp("tenants")) / "tenants.toml"
    tenants.write_text(f"[default]\ntokens_per_minute = {QUOTA}\n")
    async with running_mesh(
        text_model, redis_url=redis.url, tenants_file=tenants, idempotency_window_s=WINDOW_S, admit_patience_s=0.2
    ) as mesh:
        yield mesh


def keyed(key: str) -> dict[str, Any]:
    """Options of a call with this key."""
    return {"metadata": (("idempotency-key", key),)}


async def complete(mesh: Mesh, key: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await mesh.post("Completions", {**BODY, **fields}, **keyed(key)))
    await eventually(lambda: not mesh.gateway.keyed.num_open)
    return answer


async def test_workers_are_asked_to_keep_it_and_a_run_anew_has_its_seed_and_name(mesh: Mesh) -> None:
    first, second = [await complete(mesh, "a") for _ in range(2)]
    assert first["choices"][0]["text"] == ANSWER
    assert first == second
    requests = mesh.workers[0].requests
    assert [request.keep_s for request in requests] == [WINDOW_S, WINDOW_S]
    assert requests[0].sampling.seed == requests[1].sampling.seed
    assert requests[0].request_id != requests[1].request_id
    other = await complete(mesh, "b")
    assert other["id"] != first["id"]
    assert mesh.workers[0].requests[-1].sampling.seed != requests[0].sampling.seed


async def test_a_kept_answer_that_was_never_begun_is_run_anew(mesh: Mesh) -> None:
    first = await complete(mesh, "stale")
    mesh.workers[0].kept = WorkerGenerateResponse(stale=Stale())
    try:
        assert await complete(mesh, "stale") == first
    finally:
        mesh.workers[0].kept = None
    assert len(mesh.workers[0].requests) == 2


async def test_a_repeat_that_loses_its_worker_waits_whatever_its_objective_was(mesh: Mesh) -> None:
    """It joins the line only then, long after its first token was due."""
    fields = {"kvmesh": {"ttft_s": 0.05}}
    first = await complete(mesh, "late", **fields)
    mesh.workers[0].kept = WorkerGenerateResponse(admitted=Admitted(worker_id="w0"))
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED)
    repeat = asyncio.create_task(complete(mesh, "late", **fields))
    try:
        await eventually(lambda: sum(ask.resumes for ask in mesh.router.asks) >= 6)
        mesh.router.refusal = None
        assert (await repeat)["choices"] == first["choices"]
    finally:
        mesh.workers[0].kept = None
        repeat.cancel()


async def test_a_seed_of_its_own_goes_first(mesh: Mesh) -> None:
    await complete(mesh, "seeded", seed=5)
    assert mesh.workers[0].requests[-1].sampling.seed == 5


async def test_a_failure_frees_the_key(mesh: Mesh) -> None:
    mesh.router.refusal = Refusal(reason=REFUSAL_REASON_NO_WORKER)
    _, error, _ = await mesh.error("Completions", BODY, **keyed("c"))
    assert error["code"] == "model_unavailable"
    _, error, _ = await mesh.error("Completions", {**BODY, "max_tokens": 0}, **keyed("c"))
    assert error["param"] == "max_tokens"
    await eventually(lambda: not mesh.gateway.keyed.num_open)
    mesh.router.refusal = None
    assert (await complete(mesh, "c", prompt="another"))["choices"][0]["text"] == ANSWER


async def test_what_goes_on_without_its_client_is_charged(mesh: Mesh, client: RedisClient) -> None:
    bucket = KeySpace().quota(tenant_tag(SECRET.block_key, "default")).buckets

    async def left() -> float:
        """Of the quota, after a request that tells what the one before has given back."""
        await mesh.complete(max_tokens=1)
        return float(await client.hget(bucket, "tokens") or 0)

    async def charged(**options: Any) -> float:
        """Tokens for a client that asks for many and leaves after a few."""
        before = await left()
        mesh.say(ANSWER, hang_after=3)
        body = json.dumps({**BODY, "stream": True, "max_tokens": 8000}).encode()
        call = mesh.openai.Completions(HttpBody(data=body), **options)
        async for message in call:
            if b"capital" in message.data:
                break
        call.cancel()
        await mesh.wait_idle()
        mesh.say(ANSWER)
        return before - await left()

    assert await charged(**keyed("d")) > 4000
    assert await charged() < 1000
