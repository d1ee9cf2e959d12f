"""A real worker: front, engine and mover as processes, the real model, a real Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import common_pb2, worker_pb2

from services.common.redis_client import connect_redis
from services.common.registry import RegistryWatcher
from tests.support.log_lines import log_events
from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import SOON_S, eventually, eventually_async
from tests.worker.replica import WorkerProcess, running_worker


def prompt(length: int, first: int = 0) -> list[int]:
    """Token ids without a pattern that a cache could mistake."""
    return [(first * 131 + i * i * 37 + i * 11) % 40_000 + 100 for i in range(length)]


@pytest_asyncio.fixture
async def worker(tmp_path: Path, valkey: Valkey) -> AsyncIterator[WorkerProcess]:
    async with running_worker(tmp_path, valkey.url) as running:
        yield running


async def test_serves_a_model(worker: WorkerProcess, valkey: Valkey) -> None:
    """What one start can show: streams, cache, choices, logprobs, metrics, registry, bad input, cancellation."""
    await _identity_and_registry(worker, valkey)
    await _prefix_hits_change_nothing(worker)
    await _choices_and_logprobs(worker)
    await _bad_input_fails_alone(worker)
    await _cancelling_frees_blocks(worker)
    await _an_aborted_request_counts(worker)
    await _deadlines(worker)
    await _watch_reports_load_and_names(worker)
    assert worker.log().count("Traceback") == 0


async def _identity_and_registry(worker: WorkerProcess, valkey: Valkey) -> None:
    identity = worker.identity
    assert identity.model == "smollm2-135m"
    assert identity.total_blocks == 256
    assert identity.block_tokens == 16
    assert identity.vocab_size == 49_152
    assert identity.prefill_tokens_per_s > 0
    client = connect_redis(valkey.url)
    watcher = RegistryWatcher(client)
    task = asyncio.create_task(watcher.run())
    await eventually(lambda: "worker/w" in watcher.records)
    record = watcher.records["worker/w"]
    assert record.grpc_address == worker.told["address"]
    assert record.pull_address == identity.pull_address
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.aclose()


async def _prefix_hits_change_nothing(worker: WorkerProcess) -> None:
    tokens = prompt(100)
    cold = await worker.generate(tokens, 12)
    assert cold.cached == 0
    assert cold.finishes == {0: common_pb2.FINISH_REASON_LENGTH}
    assert cold.completed is not None
    assert cold.completed.usage.output_tokens == len(cold.tokens[0]) == 12
    warm = await worker.generate(tokens, 12)
    assert warm.cached == 96
    assert warm.admitted is not None
    assert warm.admitted.cached_tokens == 96
    assert warm.tokens == cold.tokens
    uncached = await worker.generate(tokens, 12, block_root=b"", prompt_block_ids=b"")
    assert uncached.cached == 0
    assert uncached.tokens == cold.tokens
    together = await asyncio.gather(
        *(worker.generate(tokens if i % 2 else prompt(60 + i, i), 12, tenant=f"t{i}") for i in range(16))
    )
    assert all(answer.tokens == cold.tokens for answer in together[1::2])
    stop = await worker.generate(tokens, 12, stop_token_ids=[cold.tokens[0][4]])
    assert stop.finishes == {0: common_pb2.FINISH_REASON_STOP}
    assert stop.tokens[0] == cold.tokens[0][: cold.tokens[0].index(cold.tokens[0][4]) + 1]
    samples = worker.metrics()
    assert total(samples, "kvmesh_cached_prompt_tokens_total", tier="local") >= 96
    assert total(samples, "kvmesh_output_tokens_total") >= 36


async def _choices_and_logprobs(worker: WorkerProcess) -> None:
    sampling = common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=7, num_logprobs=3)
    first = await worker.generate(prompt(40, 3), 10, num_choices=3, sampling=sampling)
    again = await worker.generate(prompt(40, 3), 10, num_choices=3, sampling=sampling, tenant="other")
    assert first.tokens == again.tokens
    assert len({tuple(tokens) for tokens in first.tokens.values()}) > 1
    assert set(first.finishes) == {0, 1, 2}
    assert first.completed is not None
    assert first.completed.usage.output_tokens == 30
    for choice, logprobs in first.logprobs.items():
        assert [position.chosen.token_id for position in logprobs] == first.tokens[choice]
        assert all(len(position.top) == 3 and position.chosen.logprob <= 0 for position in logprobs)


async def _bad_input_fails_alone(worker: WorkerProcess) -> None:
    running = asyncio.create_task(worker.generate(prompt(30, 5), 40))
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for code, arguments, changes in (
        (invalid, (prompt(10), 100_000), {}),
        (invalid, ([], 4), {}),
        (invalid, ([60_000], 4), {}),
        (invalid, (prompt(20), 0), {}),
        (invalid, (prompt(5000), 10), {}),
        (invalid, (prompt(40), 4), {"prompt_block_ids": b"x" * 15}),
        (invalid, (prompt(40), 4), {"prompt_block_ids": b"x" * 16}),
        (invalid, (prompt(40), 4), {"sampling": common_pb2.SamplingParams(logit_bias={70_000: 1.0})}),
        (grpc.StatusCode.FAILED_PRECONDITION, (prompt(40), 4), {"model_digest": b"z" * 16}),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.generate(*arguments, **changes)
        assert caught.value.code() == code
    assert total(worker.metrics(), "kvmesh_worker_requests_total", outcome="failed_precondition") == 1
    refusals = log_events(worker.log(), '"request refused"')
    assert [line["code"] for line in refusals] == ["FAILED_PRECONDITION"]
    assert refusals[0]["request_id"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Drain(worker_pb2.DrainRequest(), timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert len((await running).tokens[0]) == 40


async def _cancelling_frees_blocks(worker: WorkerProcess) -> None:
    calls = [
        worker.stub.Generate(worker.request(prompt(200, 20 + i), 500), metadata=worker.metadata()) for i in range(6)
    ]
    for call in calls:
        assert (await call.read()).WhichOneof("event") == "admitted"
    for call in calls:
        call.cancel()
    await worker.wait_idle()
    await eventually_async(lambda: _settled(worker))


async def _an_aborted_request_counts(worker: WorkerProcess) -> None:
    """Its prompt was computed and its cache hits were hits, although nobody read it to the end."""
    tokens = prompt(64, 80)
    await worker.generate(tokens, 2)
    before = worker.metrics()
    call = worker.stub.Generate(worker.request(tokens, 500), metadata=worker.metadata())
    while (await call.read()).WhichOneof("event") != "tokens":
        pass
    call.cancel()

    def counted() -> bool:
        now = worker.metrics()
        return [
            total(now, name) - total(before, name)
            for name in ("kvmesh_prompt_tokens_total", "kvmesh_cached_prompt_tokens_total")
        ] == [64, 48]

    await eventually(counted)


async def _settled(worker: WorkerProcess) -> bool:
    samples = worker.metrics()
    free = total(samples, "kvmesh_worker_free_blocks") + total(samples, "kvmesh_worker_cached_blocks")
    return free == 256 and total(samples, "kvmesh_worker_running_requests") == 0


async def _deadlines(worker: WorkerProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.generate(prompt(20), 3000, timeout_s=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.wait_idle()


async def _watch_reports_load_and_names(worker: WorkerProcess) -> None:
    call = worker.watch()
    first = await call.read()
    assert first.identity.worker_id == "w"
    assert first.load.ready
    running = asyncio.create_task(worker.generate(prompt(64, 9), 30, request_id="named", attempt=2))
    seen: list[worker_pb2.WorkerLoad] = []
    times: list[float] = []
    async with asyncio.timeout(60):
        while not any("named/2" in load.ended for load in seen):
            seen.append((await call.read()).load)
            times.append(time.monotonic())
    await running
    assert any("named/2" in load.admitted for load in seen)
    assert max(load.decoding_sequences for load in seen) == 1
    assert seen[-1].progress > seen[0].progress
    # The engine stopped: nothing is reported any more.
    os.kill(worker.child("engine"), signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    async with asyncio.timeout(0.8):
                        await asyncio.shield(pending := asyncio.ensure_future(call.read()))
                except TimeoutError:
                    break
        assert time.monotonic() - 0.8 - stopped_s < SOON_S, "watchers count their second from the last report"
    finally:
        os.kill(worker.child("engine"), signal.SIGCONT)
    report = await asyncio.wait_for(pending, 30)
    assert report.load.ready
    call.cancel()


@pytest.mark.parametrize("role", ["engine", "mover"])
async def test_a_dead_child_ends_the_replica(worker: WorkerProcess, role: str) -> None:
    running = asyncio.create_task(worker.generate(prompt(50), 2000))
    await eventually_async(lambda: _decoding(worker))
    watch = worker.watch()
    await watch.read()
    killed_s = time.monotonic()
    os.kill(worker.child(role), signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - killed_s < SOON_S
    assert await asyncio.to_thread(worker.process.wait, 30) == 1
    other = worker.child("mover" if role == "engine" else "engine")
    await eventually(lambda: not Path(f"/proc/{other}").exists())


async def _decoding(worker: WorkerProcess) -> bool:
    return (await worker.report()).load.decoding_sequences > 0


async def test_sigterm_lets_streams_finish_until_its_deadline(tmp_path: Path, valkey: Valkey) -> None:
    async with running_worker(tmp_path, valkey.url, "--drain-deadline-s", "6") as worker:
        endless = asyncio.create_task(worker.generate(prompt(50, 1), 3000))
        running = asyncio.create_task(worker.generate(prompt(50), 8))
        await eventually_async(lambda: _decoding(worker))
        watch = worker.watch()
        await watch.read()
        await worker.stub.Drain(worker_pb2.DrainRequest(), metadata=worker.metadata(), timeout=30)
        health = health_pb2_grpc.HealthStub(worker.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        worker.process.terminate()
        async with asyncio.timeout(60):
            while not (report := await watch.read()).load.draining:
                pass
        assert not report.load.ready
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker.generate(prompt(20), 2)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len((await running).tokens[0]) == 8
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await endless
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(worker.process.wait, 30) == 0
