"""The text processes: long jobs, lost helpers, jobs that never end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.models import resolve_model
from services.gateway.errors import ContextLengthExceeded, InternalError, InvalidRequest
from services.gateway.planning import ModelView, Tenant
from services.gateway.request import GenerationRequest
from services.gateway.text.pool import INLINE_BYTES, Job, ModelMissing, Preparer, TextPool
from services.gateway.text.text_model import TextModel
from services.gateway.tools.offered import ToolOffer, ToolText
from services.gateway.versions import VersionView

KEY = b"k" * 32
VIEW = ModelView(
    name="smollm2-135m", digest=b"d" * 16, context_length=8192, kv_dtype="float32", block_tokens=16, layout_version=1,
    vocab_size=49152,
)  # fmt: skip


def job(text: str, model: str = VIEW.name, offer: ToolOffer | None = None) -> Job:
    versions = {VIEW.name: (VersionView(VIEW, 1.0),)}
    request = GenerationRequest(model=model, prompts=[text])
    return Job(views=versions, tenant=Tenant("t"), request=request, offer=offer)


@asynccontextmanager
async def running_pool(text_model: TextModel, timeout_s: float) -> AsyncIterator[TextPool]:
    source = resolve_model(VIEW.name)
    made = TextPool([source], Preparer({VIEW.name: text_model}, KEY), block_key=KEY, processes=1, timeout_s=timeout_s)
    await made.start()
    yield made
    made.close()


@pytest.fixture
async def pool(text_model: TextModel) -> AsyncIterator[TextPool]:
    async with running_pool(text_model, timeout_s=60.0) as made:
        yield made


async def test_what_takes_too_long_is_ended(text_model: TextModel) -> None:
    async with running_pool(text_model, timeout_s=0.2) as pool:
        with pytest.raises(InvalidRequest, match="too long"):
            await pool.call(time.sleep, 60)


async def test_long_schemas_are_parsed_in_a_helper(pool: TextPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they consist of; here nothing is prepared."""
    monkeypatch.delattr(Preparer, "prepare")
    numbers = ", ".join(["1"] * INLINE_BYTES)
    offer = ToolOffer((ToolText("f", "", f'{{"properties": {{"a": {{"enum": [{numbers}]}}}}}}'),))
    assert (await pool.prepare(job("hi", offer=offer))).plan.functions == {"f": frozenset()}


async def test_helpers_and_the_inline_path_agree_fail_and_recover(pool: TextPool, text_model: TextModel) -> None:
    text = "a prompt of some length. " * 200
    far = await pool.prepare(job(text))
    assert far == Preparer({VIEW.name: text_model}, KEY).prepare(job(text))
    with pytest.raises(ContextLengthExceeded):
        await pool.prepare(job("word " * 10_000))
    with pytest.raises(ModelMissing):
        await pool.prepare(job(text, model="none"))
    pid = await pool.call(os.getpid)
    lost = asyncio.create_task(pool.call(time.sleep, 60))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InternalError):
        await lost
    assert pool.losses == 1
    assert await pool.prepare(job(text)) == far
