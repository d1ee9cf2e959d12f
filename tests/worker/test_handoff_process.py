"""Two real workers, one of which pulls what the other computes while it computes it, over UCX."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvmesh.v1 import common_pb2

from services.common.registry import LocationRecord
from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import WorkerProcess, running_worker
from tests.worker.test_process import prompt
from tests.worker.test_serve import Stream
from tests.worker.test_transfers_process import pull_step, registry

UCX = {"KVMESH_MOVER_TRANSPORT": "ucx"}
# An engine is stopped for longer than a worker lets its children be silent.
PATIENT = {"KVMESH_WORKER_CHILD_SILENCE_S": "100"}
# Twenty steps of prefill.
SMALL_STEPS = ("--step-token-budget", "32", "--max-running", "8")
LENGTH, MAX_TOKENS = 645, 30


def awaited(record: LocationRecord, wait_s: float = 100.0) -> common_pb2.PullStep:
    """All full blocks of a prompt that the worker of `record` is about to compute."""
    step = pull_step(record, LENGTH // 16)
    step.wait_s = wait_s
    return step


async def test_a_prompt_is_pulled_while_it_is_computed(tmp_path: Path, valkey: Valkey) -> None:
    async with (
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "p", valkey.url, *SMALL_STEPS, threads=1, env=UCX | PATIENT) as first,
        running_worker(tmp_path / "d", valkey.url, "--instance", "d", threads=1, env=UCX) as second,
    ):
        await eventually(lambda: {"worker/w", "worker/d"} <= watcher.records.keys())
        record = watcher.records["worker/w"]
        p, d = Stream(first), Stream(second)
        await _handed_over(first, p, d, record)
        await _first_is_cancelled(first, p, d, record)
        await _second_is_cancelled(p, d, record)
        await first.wait_idle()
        await second.wait_idle()
        await eventually(lambda: total(first.metrics(), "kvmesh_mover_open_leases") == 0)
        await _first_dies(first, p, d, record)
        await second.wait_idle()


@contextlib.asynccontextmanager
async def pulled_from_a_stopped_engine(first: WorkerProcess, p: Stream, key: int) -> AsyncIterator[None]:
    """The first worker has begun a prompt and gets no further in the body, at whose end its blocks are asked for.

    The body starts a pull of them. Who asks for blocks of a stopped engine waits until it goes on.
    """
    await p.read_until(lambda: _has(p, key, "admitted"))
    engine = first.child("engine")
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
        await eventually(lambda: total(first.metrics(), "kvmesh_mover_open_leases") == 1)
    finally:
        os.kill(engine, signal.SIGCONT)


async def _handed_over(first: WorkerProcess, p: Stream, d: Stream, record: LocationRecord) -> None:
    """Whoever takes over goes on with what the first would have said, and has computed next to nothing."""
    tokens = prompt(LENGTH)
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=5)
    expected = (await d.worker.generate(tokens, MAX_TOKENS, tenant="other", sampling=sampling)).tokens[0]
    await p.start(1, tokens, MAX_TOKENS, sampling=sampling)
    async with pulled_from_a_stopped_engine(first, p, 1):
        await d.start(1, tokens, MAX_TOKENS, pull_plan=[awaited(record)], hold_s=120.0, sampling=sampling)
    await d.read_until(lambda: _has(d, 1, "prepared"))
    await p.read_until(lambda: len(p.tokens(1)) >= 3)
    said = p.tokens(1)
    await p.cancel(1)
    await d.resume(1, {0: said})
    await d.read_until(lambda: 1 in d.ends)
    assert d.ends[1].code == 0
    assert said + d.tokens(1) == expected
    usage = next(event.completed.usage for event in d.events[1] if event.HasField("completed"))
    assert usage.cached.peer == LENGTH // 16 * 16, d.worker.log()[-3000:]


async def _first_is_cancelled(first: WorkerProcess, p: Stream, d: Stream, record: LocationRecord) -> None:
    """Its pull ends at once and not after wait_s: the second computes the rest, and is prepared all the same."""
    tokens = prompt(LENGTH, 1)
    await p.start(2, tokens, MAX_TOKENS)
    async with pulled_from_a_stopped_engine(first, p, 2):
        await d.start(2, tokens, MAX_TOKENS, pull_plan=[awaited(record)], hold_s=120.0)
    await p.cancel(2)
    await d.read_until(lambda: _has(d, 2, "prepared"))
    await d.resume(2, {})
    await d.read_until(lambda: 2 in d.ends)
    assert len(d.tokens(2)) == MAX_TOKENS


async def _second_is_cancelled(p: Stream, d: Stream, record: LocationRecord) -> None:
    """The first goes on to its end."""
    tokens = prompt(LENGTH, 2)
    await p.start(3, tokens, MAX_TOKENS)
    await d.start(3, tokens, MAX_TOKENS, pull_plan=[awaited(record, 60.0)], hold_s=120.0)
    await d.read_until(lambda: _has(d, 3, "admitted"))
    await d.cancel(3)
    await p.read_until(lambda: 3 in p.ends)
    assert len(p.tokens(3)) == MAX_TOKENS


async def _first_dies(first: WorkerProcess, p: Stream, d: Stream, record: LocationRecord) -> None:
    tokens = prompt(LENGTH, 3)
    await p.start(4, tokens, MAX_TOKENS)
    await d.start(4, tokens, MAX_TOKENS, pull_plan=[awaited(record, 60.0)], hold_s=120.0)
    await d.read_until(lambda: _has(d, 4, "admitted"))
    os.kill(first.child("mover"), signal.SIGSTOP)
    first.process.kill()
    await d.read_until(lambda: _has(d, 4, "prepared"))
    await d.resume(4, {})
    await d.read_until(lambda: 4 in d.ends)
    assert len(d.tokens(4)) == MAX_TOKENS


def _has(stream: Stream, key: int, kind: Any) -> bool:
    return any(event.HasField(kind) for event in stream.events.get(key, []))
