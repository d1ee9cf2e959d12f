"""Attempts with keep_s of a (simulated) worker process: they outlive their callers and end in the end."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from kvmesh.v1 import worker_pb2

from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async
from tests.worker.replica import WorkerProcess, running_worker
from tests.worker.test_serve import Stream
from tests.worker.test_sim_engine import prompt

TOKENS = 40


@pytest.fixture
async def worker(tmp_path: Path, valkey: Valkey) -> AsyncIterator[WorkerProcess]:
    flags = ("--engine", "sim", "--sim-decode-step-s", "0.01", "--max-kept-requests", "3")
    async with running_worker(tmp_path, valkey.url, *flags, threads=0) as running:
        yield running


async def attach(stream: Stream, key: int, request_id: str) -> None:
    await stream.call.write(worker_pb2.ServeRequest(attach=worker_pb2.AttachAttempt(key=key, request_id=request_id)))


async def detach(stream: Stream, key: int, *, complete: bool = False) -> None:
    await stream.call.write(worker_pb2.ServeRequest(detach=worker_pb2.DetachAttempt(key=key, complete=complete)))


def kept(worker: WorkerProcess) -> float:
    return total(worker.metrics(), "kvmesh_worker_kept_requests")


def ends(worker: WorkerProcess, reason: str) -> float:
    return total(worker.metrics(), "kvmesh_worker_kept_ends_total", reason=reason)


async def test_a_kept_attempt_outlives_its_callers(worker: WorkerProcess) -> None:
    first, second = Stream(worker), Stream(worker)
    await first.start(1, prompt(20), TOKENS, request_id="k", keep_s=120.0)
    await first.read_until(lambda: len(first.tokens(1)) > 3)
    await attach(second, 5, "k")
    await second.read_until(lambda: len(second.tokens(5)) > 5)
    first.call.cancel()
    await second.read_until(lambda: 5 in second.ends)
    third = Stream(worker)
    await attach(third, 1, "k")
    await third.read_until(lambda: 1 in third.ends)
    reference = await worker.generate(prompt(20), TOKENS)
    for stream, key in ((second, 5), (third, 1)):
        kinds = [event.WhichOneof("event") for event in stream.events[key]]
        assert (kinds[0], kinds[-2:]) == ("admitted", ["finish", "completed"])
        assert stream.tokens(key) == reference.tokens[0]
        assert stream.ends[key].code == 0
    assert total(worker.metrics(), "kvmesh_output_tokens_total") == 2 * TOKENS, "the kept answer was computed once"
    await worker.wait_idle()
    assert kept(worker) == 1


async def test_readers_of_a_held_attempt_are_told_what_it_was_resumed_with(worker: WorkerProcess) -> None:
    whole = (await worker.generate(prompt(20), TOKENS)).tokens[0]
    starter, other = Stream(worker), Stream(worker)
    known = [worker_pb2.KnownOutput(token_ids=whole[:5])]
    await starter.start(1, prompt(20), TOKENS, request_id="h", keep_s=120.0, hold_s=120.0, known=known)
    await starter.read_until(lambda: any(event.HasField("prepared") for event in starter.events.get(1, [])))
    await attach(other, 1, "h")
    await other.read_until(lambda: other.tokens(1) == whole[:5])
    await other.resume(1, {0: [1, 2, 3]})
    await starter.resume(1, {0: whole[5:9]})
    await starter.read_until(lambda: 1 in starter.ends)
    await other.read_until(lambda: 1 in other.ends)
    assert (starter.tokens(1), other.tokens(1)) == (whole[9:], whole)


async def test_a_kept_attempt_ends(worker: WorkerProcess) -> None:
    stream = Stream(worker)
    await _cancelled_by_its_starter(worker, stream)
    await _left_complete(worker, stream)
    await _read_by_nobody(worker)
    await _there_is_no_room(worker, stream)


async def _cancelled_by_its_starter(worker: WorkerProcess, stream: Stream) -> None:
    other = Stream(worker)
    await stream.start(1, prompt(20, 1), 3000, request_id="a", keep_s=120.0)
    await stream.read_until(lambda: 1 in stream.events)
    await attach(other, 1, "a")
    await attach(other, 2, "a")
    await other.read_until(lambda: other.events.keys() >= {1, 2})
    await other.cancel(2)
    seen = len(other.tokens(1))
    await other.read_until(lambda: len(other.tokens(1)) > seen + 5)
    await stream.cancel(1)
    await other.read_until(lambda: 1 in other.ends)
    assert other.ends[1].code == grpc.StatusCode.ABORTED.value[0]
    assert 2 not in other.ends
    await worker.wait_idle()
    assert kept(worker) == 0
    await attach(other, 3, "a")
    await other.read_until(lambda: 3 in other.ends)
    assert other.ends[3].code == grpc.StatusCode.NOT_FOUND.value[0]


async def _left_complete(worker: WorkerProcess, stream: Stream) -> None:
    await stream.start(2, prompt(20, 2), 3000, request_id="b", keep_s=120.0)
    await stream.read_until(lambda: len(stream.tokens(2)) > 5)
    await detach(stream, 2, complete=True)
    await worker.wait_idle()
    await attach(stream, 3, "b")
    await stream.read_until(lambda: 3 in stream.ends)
    seen = stream.tokens(2)
    assert stream.ends[3].code == 0
    assert stream.tokens(3)[: len(seen)] == seen


async def _read_by_nobody(worker: WorkerProcess) -> None:
    left = Stream(worker)
    await left.start(1, prompt(20, 3), 3000, request_id="c", keep_s=0.3)
    await left.read_until(lambda: 1 in left.events)
    await detach(left, 1)
    await eventually(lambda: ends(worker, "expired") == 1)
    await worker.wait_idle()


async def _there_is_no_room(worker: WorkerProcess, stream: Stream) -> None:
    """One is kept already, and complete: it gives way to the newest of three; a fourth running one is not kept."""
    for key in range(10, 14):
        await stream.start(key, prompt(20, key), 3000, request_id=f"d{key}", keep_s=120.0)
    await stream.read_until(lambda: stream.events.keys() >= set(range(10, 14)))
    assert (kept(worker), ends(worker, "evicted"), ends(worker, "no_room")) == (3, 1, 1)
    stream.call.cancel()

    async def running() -> bool:
        return (await worker.report()).load.running_requests == 3

    await eventually_async(running)
    assert kept(worker) == 3


async def test_what_cannot_be_admitted_is_not_kept(worker: WorkerProcess) -> None:
    stream = Stream(worker)
    await stream.start(1, prompt(4200), 5, request_id="e", keep_s=120.0)
    await stream.read_until(lambda: 1 in stream.ends)
    assert stream.ends[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (kept(worker), ends(worker, "failed")) == (0, 1)


async def test_a_drain_does_not_wait_for_what_nobody_reads(worker: WorkerProcess) -> None:
    stream, reader = Stream(worker), Stream(worker)
    await stream.start(1, prompt(20, 1), 3000, request_id="f", keep_s=120.0)
    await stream.start(2, prompt(20, 2), TOKENS, request_id="g", keep_s=120.0)
    # What two streams say is taken in any order.
    await stream.read_until(lambda: 2 in stream.events)
    await attach(reader, 1, "g")
    await reader.read_until(lambda: 1 in reader.events)
    stream.call.cancel()
    worker.process.send_signal(signal.SIGTERM)
    await reader.read_until(lambda: 1 in reader.ends)
    assert (reader.ends[1].code, len(reader.tokens(1))) == (0, TOKENS)
    await eventually(lambda: worker.process.poll() == 0)
