"""Long prompts must not hold up other streams: the event loop's lag while a megabyte is parsed and tokenised."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.inference_pb2 import TokenizeRequest

from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import Mesh, running_mesh
from tests.gateway.fakes import served_model
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 0.02
# Collections of garbage and other threads of this process disturb a try; one in several must be undisturbed.
TRIES = 6


class LagMeter:
    """The longest work of this process between two moments of a 1 ms timer.

    In processor time: what other processes take of the processors is no lag of ours.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        while True:
            started_s = time.process_time()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, time.process_time() - started_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_mesh(text_model: TextModel) -> AsyncIterator[Mesh]:
    """A mesh whose model has room for a megabyte."""
    async with running_mesh(text_model, prepare_timeout_s=120) as mesh:
        mesh.router.set_models(served_model(context_length=2**20))
        await eventually(lambda: mesh.gateway.core.catalog.views["smollm2-135m"][0].view.context_length == 2**20)
        yield mesh


async def worst_lag_s(mesh: Mesh, body: bytes) -> float:
    """The loop's worst lag from the arrival of `body` to the worker's admission."""
    meter = LagMeter()
    task = asyncio.create_task(meter.run())
    call = mesh.openai.ChatCompletions(HttpBody(data=body), timeout=120)
    await call.read()
    task.cancel()
    call.cancel()
    await mesh.wait_idle()
    return meter.worst_s


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "The quick brown fox, 1234 times. " * 32_000}],
        [{"role": "user", "content": "short"}] * 30_000,
    ],
    ids=["one long message", "many short messages"],
)
async def test_lag_of_a_megabyte(long_mesh: Mesh, messages: list[dict[str, str]]) -> None:
    long_mesh.say("ok", hang_after=0)
    body = json.dumps({"model": "smollm2-135m", "messages": messages, "stream": True}).encode()
    assert len(body) > 10**6
    lags = []
    for _ in range(TRIES):
        lags.append(await worst_lag_s(long_mesh, body))
        if lags[-1] < LIMIT_S:
            break
    print("worst lag of each try in ms:", [round(lag * 1e3, 1) for lag in lags])
    assert min(lags) < LIMIT_S, lags
    assert len(long_mesh.workers[0].requests[0].prompt_token_ids) > 100_000


async def test_lag_of_native_tokenize(long_mesh: Mesh) -> None:
    meter = LagMeter()
    task = asyncio.create_task(meter.run())
    reply = await long_mesh.native.Tokenize(TokenizeRequest(model="smollm2-135m", text="a b c d " * 120_000))
    task.cancel()
    assert len(reply.token_ids) > 400_000
