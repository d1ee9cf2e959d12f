"""What tenants' settings do to requests: classes, objectives, quotas, context, fallback; over real gRPC and Valkey."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from kvmesh.v1.common_pb2 import (
    PRIORITY_CLASS_BATCH,
    PRIORITY_CLASS_INTERACTIVE,
    PRIORITY_CLASS_STANDARD,
    Objectives,
)
from kvmesh.v1.inference_pb2 import GenerateRequest
from kvmesh.v1.router_pb2 import REFUSAL_REASON_DEADLINE, REFUSAL_REASON_OVERLOADED, Ask, Refusal

from services.common.bearer_keys import hash_key
from services.common.models import resolve_model
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import Mesh, running_mesh
from tests.gateway.fakes import FakeRouter, Script, served_model
from tests.support.valkey import Valkey
from tests.support.waiting import eventually

TENANTS = """
[tenants.classes]
priority = "batch"
most_urgent = "standard"
objectives.standard = { ttft_s = 20.0, tpot_s = 0.5 }

[tenants.quota]
requests_per_minute = 3
tokens_per_minute = 100000

[tenants.one]
concurrent_requests = 1

[tenants.short]
context_tokens = 64

[tenants.fallback]
fallback_model = "small"
"""
NAMES = ("classes", "quota", "one", "short", "fallback", "plain")


def of(tenant: str) -> dict[str, object]:
    """Options of a call that make it the tenant's."""
    return {"metadata": (("authorization", f"Bearer key-{tenant}"),)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_tenants(text_model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder = Path(tmp_path_factory.mktemp("tenants"))
    (folder / "tenants.toml").write_text(TENANTS)
    (folder / "keys").write_text("".join(f"{hash_key(f'key-{name}')} {name}\n" for name in NAMES))
    source = resolve_model("smollm2-135m")
    shutil.copy(source.path, folder / "small.gguf")
    valkey = Valkey(folder)
    valkey.start()
    try:
        async with running_mesh(
            text_model, workers=2, redis_url=valkey.url, keys_file=folder / "keys", max_attempts=3, retry_burst=2,
            retry_per_s=0.001,
            tenants_file=folder / "tenants.toml", models=("smollm2-135m", f"small={folder / 'small.gguf'}"),
        ) as mesh:  # fmt: skip
            mesh.router.set_models(served_model(), served_model(name="small"))
            await eventually(lambda: "small" in mesh.gateway.core.catalog.views)
            yield mesh
    finally:
        valkey.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def tenants(shared_tenants: Mesh) -> AsyncIterator[Mesh]:
    shared_tenants.reset()
    yield shared_tenants
    await shared_tenants.wait_idle()


BODY = {"model": "smollm2-135m", "prompt": "hi", "max_tokens": 8}
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def asked(mesh: Mesh, tenant: str, **fields: object) -> Ask:
    await mesh.post("Completions", {**BODY, **fields}, **of(tenant))
    return mesh.router.asks[-1]


async def test_class_and_objectives_reach_router_and_worker(tenants: Mesh) -> None:
    ask = await asked(tenants, "classes")
    assert (ask.priority, ask.tenant, ask.objectives) == (PRIORITY_CLASS_BATCH, "classes", Objectives())
    ask = await asked(tenants, "classes", priority="standard")
    assert ask.priority == PRIORITY_CLASS_STANDARD
    assert 19 < ask.objectives.ttft_s < 20
    assert ask.objectives.tpot_s == 0.5
    worker = next(worker for worker in tenants.workers if worker.requests)
    assert worker.requests[-1].priority == PRIORITY_CLASS_STANDARD
    ask = await asked(tenants, "plain", kvmesh={"ttft_s": 5, "priority": "interactive"})
    assert ask.priority == PRIORITY_CLASS_INTERACTIVE
    assert 4 < ask.objectives.ttft_s < 5
    request = GenerateRequest(model="smollm2-135m", text="hi", max_tokens=2, objectives=Objectives(ttft_s=7, tpot_s=1))
    async for _ in tenants.native.Generate(request, **of("plain")):
        pass
    assert 6 < tenants.router.asks[-1].objectives.ttft_s < 7
    status, error, _ = await tenants.error("Completions", {**BODY, "priority": "interactive"}, **of("classes"))
    assert (status, error["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")


async def test_an_objective_shrinks_while_the_request_waits_and_then_ends_it(tenants: Mesh) -> None:
    tenants.router.refusal = Refusal(reason=REFUSAL_REASON_OVERLOADED, retry_after_s=4)
    body = {**BODY, "kvmesh": {"ttft_s": 0.6}}
    status, error, trailing = await tenants.error("Completions", body, **of("plain"))
    assert (status, error["code"], trailing["retry-after"]) == (grpc.StatusCode.UNAVAILABLE, "objective_unmet", "4")
    left = [ask.objectives.ttft_s for ask in tenants.router.asks]
    assert len(left) > 2
    assert left == sorted(left, reverse=True)


async def test_what_a_worker_had_accepted_keeps_no_objective(tenants: Mesh) -> None:
    tenants.plan[:] = [Script([1, 2], fail_after=0), Script([1, 2])]
    await asked(tenants, "plain", kvmesh={"ttft_s": 5, "tpot_s": 1})
    first, second = tenants.router.asks
    assert first.objectives.tpot_s == 1
    assert second.objectives == Objectives()


async def test_the_time_per_token_is_reported(tenants: Mesh) -> None:
    tenants.plan[:] = [Script([1, 2, 3, 4, 5], pause_s=0.05)]
    await asked(tenants, "plain")
    await eventually(lambda: tenants.router.dones)
    assert 0.04 < tenants.router.dones[-1].tpot_s < 1


async def test_a_quota_that_is_used_up_is_429_with_its_name_and_when_to_retry(tenants: Mesh) -> None:
    for _ in range(3):
        await asked(tenants, "quota")
    status, error, trailing = await tenants.error("Completions", BODY, **of("quota"))
    assert (status, error["type"], error["code"]) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "rate_limit_exceeded",
    )  # fmt: skip
    assert "3 requests per minute" in error["message"]
    assert 1 <= int(trailing["retry-after"]) <= 20
    assert len(tenants.router.asks) == 3
    await asked(tenants, "plain")


async def test_a_place_in_flight_is_given_back_however_the_request_ends(tenants: Mesh) -> None:
    tenants.plan[:] = [Script([1, 2], hang_after=0)]
    call = asyncio.create_task(tenants.post("Completions", BODY, **of("one")))
    await eventually(lambda: any(worker.running for worker in tenants.workers))
    _, error, _ = await tenants.error("Completions", BODY, **of("one"))
    assert "1 requests at a time" in error["message"]
    call.cancel()
    await tenants.wait_idle()
    tenants.plan[:] = [Script([1, 2])]
    for _ in range(3):
        await asked(tenants, "one")


async def test_a_context_that_is_the_tenant_s_own(tenants: Mesh) -> None:
    status, error, _ = await tenants.error("Completions", {**BODY, "max_tokens": 100}, **of("short"))
    assert (status, error["code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded")
    assert "This tenant's maximum context length is 64 tokens" in error["message"]
    assert (await asked(tenants, "short", max_tokens=None)).max_output_tokens < 64


async def test_the_fallback_model_answers_and_is_named(tenants: Mesh) -> None:
    grant = FakeRouter._answer

    def answer(self: FakeRouter, ask: Ask) -> object:
        self.refusal = Refusal(reason=REFUSAL_REASON_DEADLINE) if ask.model != "small" else None
        return grant(self, ask)

    FakeRouter._answer = answer  # type: ignore[assignment, method-assign]
    try:
        raw = await tenants.post("Completions", BODY, **of("fallback"))
        assert b'"model":"small"' in raw
        assert [ask.model for ask in tenants.router.asks] == ["smollm2-135m", "small"]
        _, error, _ = await tenants.error("Completions", BODY, **of("plain"))
        assert error["code"] == "objective_unmet"
        embedded = {"model": "smollm2-135m", "input": "hi"}
        _, error, _ = await tenants.error("Embeddings", embedded, **of("fallback"))
        assert error["code"] == "objective_unmet", "vectors of another model mean nothing beside those of this one"
    finally:
        FakeRouter._answer = grant  # type: ignore[method-assign]
        tenants.router.refusal = None


async def test_retries_of_a_tenant_have_a_budget(tenants: Mesh) -> None:
    tenants.plan[:] = [Script(fail_before_admission=grpc.StatusCode.UNAVAILABLE)]
    asks = []
    for _ in range(3):
        tenants.router.asks.clear()
        status, _, trailing = await tenants.error("Completions", BODY, **of("short"))
        assert (status, "retry-after" in trailing) == (grpc.StatusCode.UNAVAILABLE, True)
        asks.append(len(tenants.router.asks))
    assert asks == [3, 1, 1]
