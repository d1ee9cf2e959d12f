"""Many attempts on one stream to a worker: they share it, and each has its own end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from kvmesh.v1.worker_pb2 import KnownOutput, WorkerGenerateRequest

from services.common.rpc import MAX_MESSAGE_BYTES
from services.gateway.pulse import Pulse
from services.gateway.worker_channels import WorkerChannels
from services.gateway.worker_link import Attempt, AttemptEnded, LinkSilent, WorkerLink
from tests.gateway.fakes import SECRET, FakeWorker, Script
from tests.support.waiting import eventually

SCRIPTS = {
    "short": Script(list(range(5))),
    "hang": Script(list(range(5)), hang_after=2),
    "long": Script(list(range(4000))),
    "drip": Script(list(range(50)), pause_s=0.01),
    "fail": Script(list(range(5)), fail_after=3),
}


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    fakes = [FakeWorker(f"w{i}", lambda request: SCRIPTS[request.request_id]) for i in range(2)]
    yield fakes
    for fake in fakes:
        await fake.server.stop(0)


@pytest.fixture
async def channels() -> AsyncIterator[WorkerChannels]:
    pulse = Pulse(0.05, 0.02)
    beating = asyncio.create_task(pulse.run())
    channels = WorkerChannels(SECRET, pulse, silence_s=1.0)
    yield channels
    await channels.close()
    beating.cancel()


def start(link: WorkerLink, name: str) -> Attempt:
    request = WorkerGenerateRequest(request_id=name, num_choices=1, max_tokens=4000)
    return link.start(request, deadline_s=30.0, metadata={"x-request-id": name})


async def read_all(attempt: Attempt) -> tuple[list[int], AttemptEnded]:
    """The tokens of an attempt, and its end."""
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while True:
            try:
                message = await attempt.read()
            except AttemptEnded as end:
                return tokens, end
            tokens += message.tokens.token_ids


@pytest.mark.parametrize("told", [0, 1, 2, 3])
async def test_a_worker_of_too_old_a_release_is_left(
    workers: list[FakeWorker], channels: WorkerChannels, told: int
) -> None:
    workers[0].protocol = told
    link = channels.acquire(await workers[0].start())
    request = WorkerGenerateRequest(request_id="drip", num_choices=1, max_tokens=4000)
    tokens, end = await read_all(link.start(request, deadline_s=30.0, metadata={}, protocol=2))
    if told >= 2:
        assert (len(tokens), end.code) == (50, grpc.StatusCode.OK)
        return
    assert (tokens, end.code) == ([], grpc.StatusCode.UNIMPLEMENTED)
    await eventually(lambda: workers[0].cancelled == 1 and not workers[0].running)
    assert len(link) == 0
    tokens, end = await read_all(start(link, "short"))
    assert (tokens, end.code) == ([0, 1, 2, 3, 4], grpc.StatusCode.OK)


async def test_attempts_share_a_stream_and_end_by_themselves(
    workers: list[FakeWorker], channels: WorkerChannels
) -> None:
    link = channels.acquire(await workers[0].start())
    attempts = {name: start(link, name) for name in ("fail", "short", "hang")}
    assert [(t, e.code) for t, e in [await read_all(attempts["short"])]] == [([0, 1, 2, 3, 4], grpc.StatusCode.OK)]
    tokens, end = await read_all(attempts["fail"])
    assert (tokens, end.code, end.detail) == ([0, 1, 2], grpc.StatusCode.INTERNAL, "scripted")
    assert len(link) == workers[0].running == workers[0].streams == 1
    reading = asyncio.create_task(read_all(attempts["hang"]))
    await asyncio.sleep(0)
    attempts["hang"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(lambda: workers[0].cancelled == 1 and not workers[0].running)
    assert len(link) == 0
    assert workers[0].metadata[0] == {"x-request-id": "fail"}


async def test_a_broken_stream_ends_exactly_its_attempts(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    addresses = [await worker.start() for worker in workers]
    broken, sound = (channels.acquire(address) for address in addresses)
    lost, kept = [start(broken, "hang") for _ in range(3)], start(sound, "hang")
    await eventually(lambda: workers[0].running == 3 and workers[1].running == 1)
    await workers[0].server.stop(0)
    ends = [await read_all(attempt) for attempt in lost]
    assert {end.code for _, end in ends} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert not broken.is_open
    assert channels.acquire(addresses[0]) is not broken
    assert channels.acquire(addresses[1]) is sound
    assert (await kept.read()).HasField("admitted")
    assert len(sound) == 1


async def test_a_slow_reader_costs_nobody_else(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    link = channels.acquire(await workers[0].start())
    slow = start(link, "long")
    assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
    await eventually(lambda: not workers[0].running)
    assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
    tokens, end = await read_all(slow)
    assert end.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens == list(range(len(tokens)))
    assert 1000 < len(tokens) < 1500


async def test_a_request_too_large_for_a_message_ends_alone(
    workers: list[FakeWorker], channels: WorkerChannels
) -> None:
    link = channels.acquire(await workers[0].start())
    other = start(link, "hang")
    assert (await other.read()).HasField("admitted")
    large = WorkerGenerateRequest(request_id="short", prompt_block_ids=bytes(MAX_MESSAGE_BYTES))
    tokens, end = await read_all(link.start(large, deadline_s=30.0, metadata={}))
    assert (tokens, end.code) == ([], grpc.StatusCode.INVALID_ARGUMENT)
    assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
    assert link.is_open
    assert len(link) == 1


async def test_what_was_not_sent_is_taken_back(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    link = channels.acquire(await workers[0].start())
    start(link, "hang").cancel()
    assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
    assert [request.request_id for request in workers[0].requests] == ["short"]


async def test_what_waits_to_be_sent_is_of_attempts_that_are_open(
    workers: list[FakeWorker], channels: WorkerChannels
) -> None:
    """However many come and go while nothing can be written."""
    link = channels.acquire(await workers[0].start())
    for _ in range(100):
        attempt = start(link, "hang")
        attempt.resume([KnownOutput(choice=0, token_ids=[1])])
        attempt.cancel()
    last = start(link, "hang")
    last.resume([])
    assert (len(link), len(link._starts), len(link._cancels), len(link._resumes)) == (1, 1, 0, 1)
    await eventually(lambda: workers[0].running == 1, timeout_s=20)
    last.cancel()
    await eventually(lambda: workers[0].cancelled == 1, timeout_s=20)
    assert (len(link._starts), len(link._cancels), len(link._resumes)) == (0, 0, 0)


async def test_nobody_at_the_address(channels: WorkerChannels) -> None:
    link = channels.acquire("127.0.0.1:1")
    _, end = await read_all(start(link, "short"))
    assert end.code is grpc.StatusCode.UNAVAILABLE
    assert not link.is_open


async def test_a_worker_that_stops_beating_is_left(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    link = channels.acquire(await workers[0].start())
    attempts = [start(link, "hang") for _ in range(3)]
    await eventually(lambda: workers[0].running == 3)
    workers[0].frozen = True
    ends = [(await read_all(attempt))[1] for attempt in attempts]
    assert {type(end) for end in ends} == {LinkSilent}
    assert (link.is_open, channels.silent_links) == (False, 1)


async def test_a_beat_tells_how_long_a_process_of_the_worker_has_been_silent(
    workers: list[FakeWorker], channels: WorkerChannels
) -> None:
    link = channels.acquire(await workers[0].start())
    workers[0].silent_s = 5.0
    assert isinstance((await read_all(start(link, "hang")))[1], LinkSilent)
    assert not link.is_open


async def test_a_worker_with_nothing_to_say_beats(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    link = channels.acquire(await workers[0].start())
    hanging = start(link, "hang")
    quietest_s = 0.0

    async def watch() -> None:
        nonlocal quietest_s
        while True:
            quietest_s = max(quietest_s, link._quiet_s)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    for _ in range(8):
        assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
    await eventually(lambda: quietest_s > 0.0)
    await eventually(lambda: link._quiet_s < quietest_s)
    watching.cancel()
    assert link.is_open
    hanging.cancel()


async def test_late_words_are_dropped_and_counted(workers: list[FakeWorker], channels: WorkerChannels) -> None:
    link = channels.acquire(await workers[0].start())
    workers[0].deaf = True
    attempt = start(link, "drip")
    assert (await attempt.read()).HasField("admitted")
    attempt.cancel()
    await eventually(lambda: channels.late_events > 0)
    assert (await read_all(start(link, "short")))[1].code is grpc.StatusCode.OK
