"""A request repeated with its Idempotency-Key through Envoy: computed once, whatever happens to gateways and workers.

Simulated workers answer by a hash of the seed, so that equal texts mean equal seeds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from tests.support.mesh import MODEL, Mesh, scrape, total
from tests.support.sim_mesh import running_sim_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 40
# Of answers that something happens to meanwhile.
LONG = {"max_tokens": 250}
ATTEMPTS = 5


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    options = ("--workers", "2", "--gateways", "2", "--routers", "1")
    with running_sim_mesh(*options, env={"KVMESH_GATEWAY_IDEMPOTENCY_WINDOW_S": "300"}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@dataclass
class Seen:
    """What one streaming client has seen."""

    text: str = ""
    id: str = ""
    created: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    output_tokens: int = 0
    broken: bool = False


def computed(mesh: Mesh) -> float:
    """Output tokens that workers have generated for requests that have ended."""
    return summed(mesh, "worker", "kvmesh_output_tokens_total")


def ended(mesh: Mesh) -> float:
    """Attempts that workers have let in and that have ended, however they did."""
    return summed(mesh, "worker", "kvmesh_worker_requests_total")


def keyed(mesh: Mesh, outcome: str) -> float:
    return summed(mesh, "gateway", "kvmesh_gateway_keyed_requests_total", outcome=outcome)


def summed(mesh: Mesh, kind: str, name: str, **labels: str) -> float:
    return sum(total(scrape(entry["metrics"]), name, **labels) for entry in mesh.of_kind(kind))


def pids(mesh: Mesh) -> dict[str, int]:
    """Of the workers, for a kill that must not come late: to ask takes as long as an answer."""
    return {entry["name"]: entry["pid"] for entry in mesh.of_kind("worker")}


def inflight(entry: dict[str, Any]) -> float:
    return total(scrape(entry["metrics"]), "kvmesh_gateway_inflight_requests")


async def read(client: openai.AsyncOpenAI, key: str, seen: Seen, *, stop_after: int = 0, **fields: Any) -> Seen:
    """Read a stream to its end, its loss, or until so many characters have come."""
    body = {"model": MODEL, "prompt": f"Tell me of {key}", "max_tokens": TOKENS, "temperature": 1.0, **fields}
    try:
        async with client.completions.with_streaming_response.create(
            **body, stream=True, stream_options={"include_usage": True}, extra_headers={"Idempotency-Key": key}
        ) as response:
            seen.headers = {name.lower(): value for name, value in response.headers.items()}
            async for chunk in await response.parse():
                seen.id, seen.created = chunk.id, chunk.created
                seen.text += "".join(choice.text for choice in chunk.choices)
                seen.output_tokens = chunk.usage.completion_tokens if chunk.usage else 0
                if stop_after and len(seen.text) > stop_after:
                    return seen
    except (httpx2.HTTPError, openai.APIError):
        seen.broken = True
    return seen


async def test_the_death_of_a_gateway(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    # On a busy machine an answer may be complete before it is known who gave it.
    for attempt in range(ATTEMPTS):
        before, gateways, first, key = computed(mesh), mesh.of_kind("gateway"), Seen(), f"gateway {attempt}"
        reading = asyncio.create_task(read(client, key, first, **LONG))
        await eventually(lambda one=first: len(one.text) > 20)
        for victim in filter(inflight, gateways):
            os.kill(victim["pid"], signal.SIGKILL)
        await reading
        if first.broken:
            break
        mesh.wait_ready()
    assert first.broken
    second = await read(client, key, Seen(), **LONG)
    assert not second.broken
    assert second.text.startswith(first.text)
    assert (second.id, second.created, second.output_tokens) == (first.id, first.created, LONG["max_tokens"])
    assert second.headers["x-kvmesh-worker"] == first.headers["x-kvmesh-worker"]
    assert (first.headers.get("x-kvmesh-replayed"), second.headers["x-kvmesh-replayed"]) == (None, "true")
    third = await read(client, key, Seen(), **LONG)
    assert (third.text, third.id) == (second.text, second.id)
    assert computed(mesh) - before == LONG["max_tokens"]


async def test_other_requests(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    one = await read(client, "other", Seen())
    assert not one.broken
    with pytest.raises(openai.ConflictError) as reused:
        await client.completions.create(model=MODEL, prompt="x", extra_headers={"Idempotency-Key": "other"})
    assert (reused.value.status_code, reused.value.code) == (409, "idempotency_key_reused")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model=MODEL, prompt="x", extra_headers={"Idempotency-Key": "k" * 300})
    assert wrong.value.param == "Idempotency-Key"
    two = await read(client, "other 2", Seen(), prompt="Tell me of other")
    assert two.text != one.text, "seeds derive from keys"


async def test_whole_answers_and_what_is_in_them(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 30,
        "n": 2,
        "logprobs": True,
        "extra_headers": {"Idempotency-Key": "whole"},
    }
    before = computed(mesh)
    answers = [await client.chat.completions.create(**ask) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert {len(choice.logprobs.content) for choice in answers[0].choices if choice.logprobs} == {30}
    assert computed(mesh) - before == 60


async def test_several_prompts(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two", "three"], "max_tokens": 20, "n": 2}
    before = computed(mesh)
    answers = [await client.completions.create(**ask, extra_headers={"Idempotency-Key": "three"}) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(answers[0].choices) == 6
    assert computed(mesh) - before == 120


async def test_stop_strings(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    whole = await read(client, "stop", Seen())
    stop = whole.text[len(whole.text) // 2 :][:12]
    before = ended(mesh)
    cut = [await read(client, "stop 2", Seen(), prompt="Tell me of stop", stop=[stop], seed=7) for _ in range(2)]
    assert cut[0].text == cut[1].text
    assert (cut[0].output_tokens, cut[0].id) == (cut[1].output_tokens, cut[1].id)
    assert ended(mesh) - before == 1


async def test_repeats_at_the_same_time(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    before = computed(mesh)
    answers = await asyncio.gather(*(read(client, "together", Seen()) for _ in range(8)))
    assert len({(seen.text, seen.id, seen.output_tokens) for seen in answers}) == 1
    assert sum("x-kvmesh-replayed" in seen.headers for seen in answers) == 7
    assert computed(mesh) - before == TOKENS


async def test_a_client_that_comes_back(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    mesh.wait_ready()
    before, gateways = computed(mesh), mesh.of_kind("gateway")
    first = await read(client, "back", Seen(), stop_after=20, **LONG)
    await eventually(lambda: not any(map(inflight, gateways)))
    second = await read(client, "back", Seen(), **LONG)
    assert second.text.startswith(first.text)
    assert computed(mesh) - before == second.output_tokens == LONG["max_tokens"]


async def test_a_repeat_survives_the_worker_that_it_reads_from(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    before, workers, second = keyed(mesh, "anew"), pids(mesh), Seen()
    first = await read(client, "both", Seen(), stop_after=20, **LONG)
    reading = asyncio.create_task(read(client, "both", second, **LONG))
    await eventually(lambda: len(second.text) > len(first.text) + 20)
    os.kill(workers[second.headers["x-kvmesh-worker"]], signal.SIGKILL)
    await reading
    assert not second.broken
    reference = await read(client, "both", Seen(), **LONG)
    assert (second.text, second.output_tokens) == (reference.text, LONG["max_tokens"])
    assert "x-kvmesh-replayed" not in reference.headers, "nobody has the answer: it is computed anew"
    assert keyed(mesh, "anew") == before + 1
    mesh.wait_ready()


@pytest.mark.parametrize(("number", "logprobs"), [(signal.SIGKILL, None), (signal.SIGKILL, 1), (signal.SIGTERM, None)])
async def test_an_answer_that_has_left_its_worker(
    mesh: Mesh, client: openai.AsyncOpenAI, number: signal.Signals, logprobs: int | None
) -> None:
    """It can be read again where it went, unless the lost worker took log probabilities with it."""
    workers, first, fields = pids(mesh), Seen(), {"logprobs": logprobs, **LONG}
    key = f"left {number} {logprobs}"
    reading = asyncio.create_task(read(client, key, first, **fields))
    await eventually(lambda: len(first.text) > 20)
    os.kill(workers[first.headers["x-kvmesh-worker"]], number)
    await reading
    assert not first.broken
    second = await read(client, key, Seen(), **fields)
    assert (second.text, second.id, second.output_tokens) == (first.text, first.id, LONG["max_tokens"])
    assert ("x-kvmesh-replayed" in second.headers) is (logprobs is None)
    mesh.wait_ready()


async def test_without_redis(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    """The last of the module: requests run, each for itself, to the same text."""
    mesh.kill("valkey")
    answers = await asyncio.gather(*(read(client, "no redis", Seen()) for _ in range(2)))
    assert [seen.broken for seen in answers] == [False, False]
    assert answers[0].text == answers[1].text
    mesh.wait_ready()
    key = "a secret key of a client"
    await read(client, key, Seen())
    assert key not in mesh.logs()
