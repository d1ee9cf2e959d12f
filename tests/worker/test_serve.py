"""Many attempts of one caller on a Serve stream of a (simulated) worker process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import worker_pb2

from services.common.rpc import call_metadata
from services.common.security import MeshSecret
from services.worker.front import Front
from services.worker.kept_streams import KeptStreams
from services.worker.load_board import LoadBoard
from services.worker.messages import Message, MoveRequested
from services.worker.observation import WorkerMetrics
from services.worker.serve_session import ServeSession
from services.worker.streams import StreamTable
from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.cores import submit
from tests.worker.replica import WorkerProcess, running_worker
from tests.worker.test_sim_engine import prompt

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def worker(tmp_path: Path, valkey: Valkey) -> AsyncIterator[WorkerProcess]:
    async with running_worker(
        tmp_path, valkey.url, "--engine", "sim", "--sim-decode-step-s", "0.02", threads=0
    ) as running:
        yield running


class Stream:
    """A Serve stream and what has come down on it, by key."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.call: Any = worker.stub.Serve(metadata=worker.metadata())
        self.batches: list[worker_pb2.ServeBatch] = []
        self.events: dict[int, list[worker_pb2.WorkerGenerateResponse]] = {}
        self.ends: dict[int, worker_pb2.AttemptEnd] = {}

    async def start(self, key: int, tokens: list[int], max_tokens: int, **changes: Any) -> None:
        fields = {name: changes.pop(name) for name in ("deadline_s", "metadata") if name in changes}
        request = self.worker.request(tokens, max_tokens, **changes)
        await self.call.write(
            worker_pb2.ServeRequest(start=worker_pb2.StartAttempt(key=key, request=request, **fields))
        )

    async def cancel(self, key: int) -> None:
        await self.call.write(worker_pb2.ServeRequest(cancel=key))

    async def resume(self, key: int, further: dict[int, list[int]], *, hold: bool = False) -> None:
        known = [worker_pb2.KnownOutput(choice=choice, token_ids=tokens) for choice, tokens in further.items()]
        resume = worker_pb2.ResumeAttempt(key=key, further=known, hold=hold)
        await self.call.write(worker_pb2.ServeRequest(resume=resume))

    async def is_over(self) -> bool:
        """Whether the stream ends without another message."""
        async with asyncio.timeout(60):
            return await self.call.read() is grpc.aio.EOF

    async def read_until(self, done: Any, within_s: float = 60.0) -> None:
        """Read batches until `done()`."""
        async with asyncio.timeout(within_s):
            while not done():
                batch = await self.call.read()
                assert isinstance(batch, worker_pb2.ServeBatch), "the stream has ended"
                self.batches.append(batch)
                for part in batch.attempts:
                    assert part.key not in self.ends, "nothing follows an end"
                    self.events.setdefault(part.key, []).extend(part.events)
                    if part.HasField("end"):
                        self.ends[part.key] = part.end

    def tokens(self, key: int) -> list[int]:
        return [token for event in self.events.get(key, []) for token in event.tokens.token_ids]


async def test_attempts_of_one_stream(worker: WorkerProcess) -> None:
    stream = Stream(worker)
    await _steps_share_messages(stream)
    await _refusals_fail_alone(stream)
    await _cancelling_releases_one(stream)
    await _half_closed_ends_with_the_last(stream)
    await _breaking_releases_all(worker)
    await _held_attempts_wait_for_more(worker)
    await _only_members_are_served(worker)
    assert TRACE in worker.log()
    assert "Traceback" not in worker.log()


async def _steps_share_messages(stream: Stream) -> None:
    alone = await stream.worker.generate(prompt(20, 3), 12)
    metadata = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    for key in range(8):
        await stream.start(key, prompt(20, key), 12, metadata=metadata)
    await stream.read_until(lambda: len(stream.ends) == 8)
    assert all(end.code == 0 for end in stream.ends.values())
    kinds = {key: [event.WhichOneof("event") for event in events] for key, events in stream.events.items()}
    assert all(one[0] == "admitted" and one[-2:] == ["finish", "completed"] for one in kinds.values())
    assert all(len(stream.tokens(key)) == 12 for key in range(8))
    assert stream.tokens(3) == alone.tokens[0]
    assert max(len(batch.attempts) for batch in stream.batches) >= 4, "a step's tokens go together"


async def _refusals_fail_alone(stream: Stream) -> None:
    await stream.start(10, prompt(20, 10), 60)
    await stream.start(11, prompt(20, 11), 5, model_digest=b"another")
    await stream.start(12, prompt(4200, 12), 5)
    await stream.start(13, prompt(20, 13), 2000, deadline_s=0.3)
    await stream.start(10, prompt(20, 10), 5)
    await stream.start(14, prompt(20, 14), 30)
    await stream.read_until(lambda: stream.ends.keys() >= {10, 11, 12, 13, 14})
    code = grpc.StatusCode
    wanted = {
        10: code.INVALID_ARGUMENT,
        11: code.FAILED_PRECONDITION,
        12: code.INVALID_ARGUMENT,
        13: code.DEADLINE_EXCEEDED,
        14: code.OK,
    }
    assert {key: stream.ends[key].code for key in wanted} == {key: one.value[0] for key, one in wanted.items()}
    assert stream.ends[11].detail == "this replica serves another model"


async def _cancelling_releases_one(stream: Stream) -> None:
    await stream.start(20, prompt(64, 20), 3000)
    await stream.start(21, prompt(20, 21), 20)
    await stream.read_until(lambda: 20 in stream.events)
    await stream.cancel(20)
    await stream.cancel(20)
    await stream.read_until(lambda: 21 in stream.ends)
    await stream.worker.wait_idle()
    assert 20 not in stream.ends


async def _half_closed_ends_with_the_last(stream: Stream) -> None:
    await stream.start(30, prompt(20, 30), 10)
    await stream.call.done_writing()
    await stream.read_until(lambda: 30 in stream.ends)
    assert stream.ends[30].code == 0
    assert await stream.is_over()


async def _breaking_releases_all(worker: WorkerProcess) -> None:
    stream = Stream(worker)
    for key in range(4):
        await stream.start(key, prompt(64, 40 + key), 3000)
    await stream.read_until(lambda: len(stream.events) == 4)
    stream.call.cancel()
    await worker.wait_idle()


async def _held_attempts_wait_for_more(worker: WorkerProcess) -> None:
    stream, whole = Stream(worker), (await worker.generate(prompt(50, 60), 30)).tokens[0]
    known = [worker_pb2.KnownOutput(token_ids=whole[:9])]
    await stream.start(1, prompt(50, 60), 30, known=known, hold_s=120.0)
    await stream.start(2, prompt(50, 60), 30, known=known, hold_s=0.5)
    await stream.resume(9, {})
    await stream.read_until(lambda: len(stream.events.get(1, [])) == 2)
    assert [event.WhichOneof("event") for event in stream.events[1]] == ["admitted", "prepared"]
    await stream.read_until(lambda: 2 in stream.ends)
    assert stream.ends[2].code == grpc.StatusCode.ABORTED.value[0]
    await stream.read_until(lambda: not stream.batches[-1].attempts)
    await stream.resume(1, {0: whole[9:12]})
    await stream.read_until(lambda: 1 in stream.ends)
    assert stream.tokens(1) == whole[12:]
    assert stream.events[1][-1].completed.usage.output_tokens == 30
    stream.call.cancel()


async def _only_members_are_served(worker: WorkerProcess) -> None:
    call: Any = worker.stub.Serve(metadata=call_metadata(MeshSecret("the secret of another mesh")))
    # The refusal is that of a call with one request, which must come first.
    await call.write(worker_pb2.ServeRequest(cancel=1))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(60):
            await call.read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_drained_worker_ends_the_stream_after_its_attempts(worker: WorkerProcess) -> None:
    stream, idle = Stream(worker), Stream(worker)
    await stream.start(1, prompt(20), 40)
    await stream.start(2, prompt(20), 3000)
    await stream.read_until(lambda: len(stream.events) == 2)
    await worker.stub.Drain(worker_pb2.DrainRequest(), metadata=worker.metadata(), timeout=30)
    await stream.start(3, prompt(20), 5)
    await stream.read_until(lambda: 3 in stream.ends)
    assert stream.ends[3].code == grpc.StatusCode.UNAVAILABLE.value[0]
    worker.process.send_signal(signal.SIGTERM)
    await stream.read_until(lambda: 1 in stream.ends)
    assert (stream.ends[1].code, len(stream.tokens(1))) == (0, 40)
    for key in (1, 2):
        moves = [event.move_wanted for event in stream.events[key] if event.HasField("move_wanted")]
        assert [move.reason for move in moves] == [worker_pb2.MOVE_REASON_DRAINING]
    assert total(worker.metrics(), "kvmesh_worker_moves_wanted_total") == 2
    await stream.cancel(2)
    # What was on its way when it was cancelled comes first.
    while not await stream.is_over():
        pass
    assert await idle.is_over()
    await eventually(lambda: worker.process.poll() == 0)


class EngineLink:
    """Takes what an engine would be told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


def front_without_engine(board: LoadBoard, streams: StreamTable, link: EngineLink | None = None) -> Front:
    return Front(
        SimpleNamespace(link=link), None, board=board, streams=streams, announcer=None, metrics=WorkerMetrics(board),
        child_silence_s=1.0, departure_s=60.0, node_failing=lambda _: None,
    )  # type: ignore[arg-type]  # fmt: skip


def session_without_engine(board: LoadBoard, streams: StreamTable, link: EngineLink | None = None) -> ServeSession:
    front = front_without_engine(board, streams, link)
    identity, kept = worker_pb2.WorkerIdentity(worker_id="w"), KeptStreams(max_kept=4)
    return ServeSession(front, identity, kept, default_deadline_s=1.0)


async def starts(count: int) -> AsyncIterator[worker_pb2.ServeRequest]:
    for key in range(count):
        yield worker_pb2.ServeRequest(start=worker_pb2.StartAttempt(key=key))


async def test_a_quiet_stream_gives_signs_of_life_while_its_engine_does() -> None:
    board, link = LoadBoard(engine_silence_s=60.0, mover_silence_s=60.0), EngineLink()
    streams = StreamTable(max_requests=4, stream_queue=4)
    board.ready = True
    session = session_without_engine(board, streams, link)
    batches, loop = session.batches(), asyncio.get_running_loop()
    first = asyncio.create_task(anext(batches))
    reading = asyncio.create_task(session.read(lasting(starts(1))))
    board.mover_heard(loop.time())
    for _ in range(3):
        board.engine_heard(loop.time())
        async with asyncio.timeout(60):
            assert not (await first).attempts
        first = asyncio.create_task(anext(batches))
    assert len(link.sent) == 1
    board.engine_heard(loop.time() - 61)
    done, _ = await asyncio.wait([first], timeout=0.7)
    assert not done, "the engine may be stopped"
    board.engine_heard(loop.time() - 20)
    async with asyncio.timeout(60):
        sign = await first
    assert not sign.attempts
    assert sign.silent_s >= 20, "its reader counts the engine's silence from its last word"
    reading.cancel()
    session.close()


async def lasting(requests: AsyncIterator[worker_pb2.ServeRequest]) -> AsyncIterator[worker_pb2.ServeRequest]:
    """A caller that does not end its side."""
    async for request in requests:
        yield request
    await asyncio.Event().wait()


async def test_a_start_that_breaks_ends_alone() -> None:
    board, streams = LoadBoard(), StreamTable(max_requests=4, stream_queue=4)
    board.ready = True
    session = session_without_engine(board, streams)
    await session.read(starts(10))
    ends = [part.end.code for batch in [b async for b in session.batches()] for part in batch.attempts]
    assert ends == [grpc.StatusCode.INTERNAL.value[0]] * 10
    assert len(session) == len(streams) == 0


async def test_a_caller_that_reads_no_refusals_is_let_go() -> None:
    board, streams = LoadBoard(), StreamTable(max_requests=4, stream_queue=4)
    session = session_without_engine(board, streams)
    await session.read(starts(10_000))
    batches = [batch async for batch in session.batches()]
    assert session.is_unread
    assert 4000 < sum(len(batch.attempts) for batch in batches) < 5000
    assert {part.end.code for part in batches[0].attempts} == {grpc.StatusCode.UNAVAILABLE.value[0]}
    assert len(session) == len(streams) == 0


async def test_readers_are_asked_to_move_one_after_another() -> None:
    """Held attempts at once: they have just come, and would be taken over by the reader."""
    board, link = LoadBoard(), EngineLink()
    streams = StreamTable(max_requests=16, stream_queue=16)
    board.ready = True
    front = front_without_engine(board, streams, link)
    opened = [front.submit(f"r{n}/1", lambda key: submit(key, [1, 2, 3], 5), is_held=n == 3) for n in range(4)]
    for stream in opened:
        stream.admitted = True

    def asked() -> list[int]:
        told = [one.drain() for one in opened]
        return [n for n, events in enumerate(told) if any(isinstance(event, MoveRequested) for event in events)]

    front.drain()
    assert asked() == [0, 3]
    front.release(opened[0])
    assert asked() == [1]
    front.release(opened[1])
    assert asked() == [2]
    front.release(opened[2])
    front.release(opened[3])
    assert not streams
