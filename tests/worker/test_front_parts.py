"""The front's pure parts: streams, load board, push target, spans, conversion, settings."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from kvmesh.v1 import common_pb2, worker_pb2
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.step_costs import StepWork
from services.router.watch import load_of
from services.worker import observation
from services.worker.convert import chunk_proto, load_proto, submit_message
from services.worker.link_messages import RunTiming
from services.worker.link_rates import LinkRates
from services.worker.load_board import LoadBoard
from services.worker.messages import (
    AdmittedRequest,
    ChoiceOutput,
    HolderRun,
    PositionLogprob,
    RequestFailed,
    RequestUsage,
    StaleRequest,
)
from services.worker.rates import Rates
from services.worker.streams import StreamTable
from tests.worker.cores import make_core

USAGE = RequestUsage(1, 100, 20, 16, 0, 32, 0, 0.1, 0.2, 0.3)


async def test_a_stream_ends_once_and_is_bounded() -> None:
    table = StreamTable(max_requests=2, stream_queue=3)
    stream = table.open("r/1")
    outputs = [ChoiceOutput(stream.key, 0, [i], [], "") for i in range(4)]
    assert [stream.put(output) for output in outputs] == [True, True, True, False]
    assert stream.put(RequestFailed(stream.key, "RESOURCE_EXHAUSTED", "slow"))
    assert stream.put(StaleRequest(stream.key)), "ignored: the stream has ended"
    events = await stream.take()
    assert [type(event) for event in events] == [ChoiceOutput] * 3 + [RequestFailed]
    other = table.open("r/2")
    assert table.is_full
    assert other.key != stream.key
    waiting = asyncio.create_task(table.wait_empty())
    assert table.close(stream.key) is stream
    assert table.close(stream.key) is None
    table.fail_all("UNAVAILABLE", "gone")
    assert other.is_ended
    table.close(other.key)
    async with asyncio.timeout(60):
        await waiting


async def test_taking_waits_for_an_event() -> None:
    stream = StreamTable(max_requests=1, stream_queue=3).open("r/1")
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not taking.done()
    stream.put(AdmittedRequest(stream.key, 0))
    assert await taking == [AdmittedRequest(stream.key, 0)]


def test_every_watcher_sees_every_name_once() -> None:
    board = LoadBoard(engine_silence_s=1.0, mover_silence_s=3.0)
    with board.watch() as first, board.watch() as second:
        board.note_admitted("r/1")
        assert first.take() == (["r/1"], [])
        board.note_ended("r/1")
        assert first.take() == ([], ["r/1"])
        assert second.take() == (["r/1"], ["r/1"])
        assert second.wake.is_set()


def test_silence_of_either_child_shows() -> None:
    board = LoadBoard(engine_silence_s=1.0, mover_silence_s=3.0)
    board.engine_heard(10.0)
    board.mover_heard(10.0)
    assert not board.is_silent(10.9)
    assert board.is_silent(11.1)
    board.engine_heard(13.05)
    assert board.is_silent(13.1)
    assert board.silences_s(14.0) == [pytest.approx(0.95), pytest.approx(4.0)]
    assert board.computing_silence_s(14.0) == pytest.approx(0.95)


def test_silence_counts_from_the_beginning_of_a_replica_before_it_has_said_anything() -> None:
    board = LoadBoard(engine_silence_s=1.0, mover_silence_s=3.0)
    board.engine_heard(10.0)
    board.ranks_heard_s["rank1"] = 10.0
    board.reset(5000.0)
    assert board.silences_s(5000.5) == [0.5, 0.5]
    assert not board.is_silent(5000.5)
    assert board.computing_silence_s(5001.5) == 1.5


def test_a_pause_of_the_front_is_nobodys_silence() -> None:
    board = LoadBoard(engine_silence_s=1.0, mover_silence_s=3.0)
    for tick_s in (9.75, 10.0):
        board.tick(tick_s)
        board.engine_heard(tick_s)
        board.mover_heard(tick_s)
        board.ranks_heard_s["rank1"] = tick_s
    assert max(board.silences_s(18.0)) == pytest.approx(0.25), "what has come since then is not read yet"
    board.tick(18.0)
    assert not board.is_silent(18.4)
    board.engine_heard(18.4)
    board.mover_heard(18.4)
    for tick_s in (18.25, 18.5, 18.75, 19.0):
        board.tick(tick_s)
    assert board.is_silent(19.0), "the rank has had its time to be heard"
    assert board.computing_silence_s(19.0) == pytest.approx(9.0)


def test_spans_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(observation, "_tracer", provider.get_tracer("test"))
    observation.record_spans(USAGE, parent=otel_context.Context(), submitted_ns=10**9, ended_ns=3 * 10**9)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["queue", "prefill", "decode"]
    assert all(a.end_time == b.start_time for a, b in pairwise(spans))
    assert spans[0].start_time == 1_200_000_000
    assert spans[-1].end_time == 3 * 10**9
    provider.shutdown()


def test_conversion_keeps_what_was_asked() -> None:
    request = worker_pb2.WorkerGenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 70_000],
        sampling=common_pb2.SamplingParams(temperature=0.5, num_logprobs=0, logit_bias={3: -1.0}),
        max_tokens=4,
        pull_plan=[common_pb2.PullStep(kind=common_pb2.LOCATION_KIND_KVSTORE, location_id="n", num_blocks=2)],
    )
    message = submit_message(request, key=9, deadline_s=3.0, traceparent="")
    assert message.prompt == (1).to_bytes(4, "little") + (70_000).to_bytes(4, "little")
    assert (message.sampling.top_p, message.sampling.repetition_penalty) == (1.0, 1.0)
    assert message.sampling.num_logprobs == 0
    assert message.priority == common_pb2.PRIORITY_CLASS_STANDARD
    assert message.pull_plan[0].kind == "kvstore"
    outputs = [ChoiceOutput(9, 1, [5], [PositionLogprob(-0.5, [(5, -0.5)])], ""), ChoiceOutput(9, 1, [6], [], "stop")]
    chunk = chunk_proto(outputs).tokens
    assert (chunk.choice, list(chunk.token_ids)) == (1, [5, 6])
    assert chunk.logprobs[0].top[0].token_id == 5


def test_routers_hear_what_was_learned_of_links() -> None:
    board = LoadBoard()
    board.ready = True
    core = make_core()
    links = LinkRates(1000)
    run = HolderRun("kvstore", "n", 1, "a", "b", 0, 5, 2)
    links.observe([run], [RunTiming(5, 2, 0.5, 1.0, "ok")], 0.0)
    links.observe([HolderRun("worker", "w", 1, "a", "b", 0, 5)], [RunTiming(5, 0, 0.5, 1.0, "ok")], 0.0)
    links.begin([run])
    board.load = msgspec.structs.replace(core.load(0.0), holders=links.messages(30.0))
    # The one used last comes last.
    peer, node = load_of(load_proto(board)).holders
    assert (node.holder, node.memory, node.in_flight_bytes) == ("kvstore/n@1", None, 5000)
    assert node.ssd is not None
    assert node.ssd.setup_s == pytest.approx(links.ssd(run, 0.0).setup_s)
    assert node.ssd.freshness == pytest.approx(0.5)
    assert (peer.holder, peer.ssd, peer.in_flight_bytes) == ("worker/w@1", None, 0)
    assert peer.memory is not None
    assert peer.memory.bytes_per_s > 0


def test_rates_recover_from_a_slow_time() -> None:
    rates = Rates(1000.0, 0.02)
    for _ in range(50):
        rates.observe_step(StepWork(64, 0.0, 0, 0), 10.0)
    assert rates.token_budget(512, 0.2) == 64
    for _ in range(50):
        tokens = rates.token_budget(512, 0.2)
        rates.observe_step(StepWork(tokens, 0.0, 0, 0), tokens / 2000)
    assert rates.token_budget(512, 0.2) > 350
    rates.observe_step(StepWork(0, 0.0, 3, 300), 0.12)
    assert rates.decode_step_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "nowhere"], "model='nowhere'"),
        (["--max-running", "600"], "max_running=600"),
        (["--threads", "-1"], "threads"),
        (["--listen", "TAKEN"], "TAKEN"),
    ],
)
def test_a_wrong_start_ends_with_one_line(flags: list[str], named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = [address if flag == "TAKEN" else flag for flag in flags]
        command = [sys.executable, "-m", "services.worker", "--mesh-secret", "a secret of the tests", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode in (1, 2)
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert named.replace("TAKEN", address) in ended.stderr
