"""Models that are loaded when they are asked for, in whole meshes: real ones in turn, and an alias that moves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.tiny_model import write_tiny_model
from services.common.models import resolve_model
from tests.support.mesh import MODEL, Mesh, running_mesh, wait_for
from tests.support.sim_mesh import running_sim_mesh
from tests.support.waiting import eventually, eventually_async

PATIENCE_S = 300
# A busy machine may take longer to load a model than requests wait for it by default.
PATIENCE = {f"KVMESH_GATEWAY_{name}": str(PATIENCE_S) for name in ("MAX_COLD_WAIT_S", "RESCUE_WAIT_S")}


@pytest.fixture(scope="module")
def real_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """No worker at all, and room for one of two models at a time."""
    tiny = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    options = ("--workers", "0", "--on-demand", MODEL, "--on-demand", f"tiny={tiny}")
    sizes = ("--max-loaded-models", "1", "--unload-idle-s", "6", "--kvstores", "0", "--kv-cache-mb", "64")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options, *sizes, env=PATIENCE) as mesh:
        yield mesh


async def post(mesh: Mesh, model: str) -> tuple[dict[str, str], Any]:
    """Headers and body of an answer."""
    async with client_of(mesh) as client:
        raw = await client.completions.with_raw_response.create(
            model=model, prompt="The capital of France is", max_tokens=4, temperature=0
        )
        return dict(raw.headers), raw.parse()


def client_of(mesh: Mesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S)


async def states(mesh: Mesh) -> dict[str, str]:
    async with client_of(mesh) as client:
        models = await client.models.list()
    return {model.id: model.model_dump()["kvmesh"]["state"] for model in models.data}


def worker_pid(mesh: Mesh) -> int:
    """Of the one worker that there is; 0: none."""
    return next((entry["pid"] or 0 for entry in mesh.of_kind("worker")), 0)


async def test_models_take_turns_and_survive_a_kill_while_they_load(real_mesh: Mesh) -> None:
    mesh = real_mesh
    assert await states(mesh) == {MODEL: "unloaded", "tiny": "unloaded"}
    with pytest.raises(openai.NotFoundError):
        await post(mesh, "nobody")
    headers, answer = await post(mesh, MODEL)
    assert float(headers["x-kvmesh-cold-start-s"]) > 0
    assert answer.choices[0].text.strip()
    assert (await states(mesh))["tiny"] == "unloaded"
    before = await asyncio.to_thread(worker_pid, mesh)
    # The other model is to go for it; its worker is killed as soon as there is one.
    second = asyncio.create_task(post(mesh, "tiny"))
    seen = {0, before}

    def has_come() -> bool:
        seen.add(worker_pid(mesh))
        return len(seen) > len({0, before})

    await asyncio.to_thread(wait_for, has_come, within_s=PATIENCE_S, what="the worker of tiny")
    (pid,) = seen - {0, before}
    os.kill(pid, signal.SIGKILL)
    _, answer = await second
    assert answer.model == "tiny"
    # Nobody uses it: it goes, and no process is left.
    await asyncio.to_thread(
        wait_for, lambda: not mesh.of_kind("worker"), within_s=PATIENCE_S, what="the unload of an idle model"
    )
    await eventually_async(lambda: _all_unloaded(mesh), PATIENCE_S)


async def _all_unloaded(mesh: Mesh) -> bool:
    return set((await states(mesh)).values()) == {"unloaded"}


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    """The model that answered."""
    stream = await client.completions.create(model="best", prompt=f"Question {number}", max_tokens=20, stream=True)
    models = {chunk.model async for chunk in stream}
    assert len(models) == 1
    return models.pop()


async def test_an_alias_that_moves_to_a_cold_model_under_load_fails_nobody() -> None:
    other = f"other={resolve_model(MODEL).path}"
    with running_sim_mesh("--workers", "1", "--on-demand", other, env=PATIENCE) as mesh:
        mesh.kvmesh("ctl", "alias", "best", MODEL)
        answered: list[str] = []
        done = asyncio.Event()

        async def keep_asking(client: openai.AsyncOpenAI, lane: int) -> None:
            number = lane
            while not done.is_set():
                answered.append(await ask(client, number))
                number += 8

        async with client_of(mesh) as client:
            await eventually_async(lambda: _is_listed(client, "best"))
            lanes = [asyncio.create_task(keep_asking(client, lane)) for lane in range(8)]
            await eventually(lambda: len(answered) >= 16 or any(lane.done() for lane in lanes), PATIENCE_S)
            await asyncio.to_thread(mesh.kvmesh, "ctl", "alias", "best", "other")
            await eventually(lambda: answered.count("other") >= 16 or any(lane.done() for lane in lanes), PATIENCE_S)
            done.set()
            await asyncio.gather(*lanes)
        assert set(answered) == {MODEL, "other"}
        # Once it had moved, nobody got the old model any more, but for those that were on their way.
        assert MODEL not in answered[answered.index("other") + len(lanes) :]


async def _is_listed(client: openai.AsyncOpenAI, name: str) -> bool:
    return name in [model.id for model in (await client.models.list()).data]
