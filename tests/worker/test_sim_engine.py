"""A simulated worker: the real process, its time, its words, and what it refuses to be told."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmesh.v1 import common_pb2

from services.common.models import DEFAULT_MODEL, ModelSource, resolve_model
from services.common.settings import ConfigurationError, load_settings
from services.common.time_model import TimeModel
from services.common.tokenizer_digest import tokenizer_digest
from services.gateway.text.text_model import load_text_model
from services.worker.config import WorkerSettings, check_settings
from services.worker.draws import DrawRow
from services.worker.engine.sim import sim_digest
from services.worker.engine.sim_model import ModelShape, read_sim_model
from services.worker.engine.sim_runner import DeviceClock, SimRunner
from services.worker.engine.sim_settings import time_model
from services.worker.messages import Sampling
from services.worker.model.step import StepInput
from services.worker.replica import revised_digest
from tests.support.processes import clean_environment
from tests.support.processor_time import idle_share
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import SECRET, WorkerProcess, running_worker

TIMES = TimeModel(prefill_tokens_per_s=1000.0, decode_step_s=0.01, decode_sequence_s=0.001, context_s=1e-5)
# A prompt of 1,024 tokens takes half a second, which no busy machine makes shorter.
SLOW = ("--sim-prefill-tokens-per-s", "2048", "--sim-decode-step-s", "0.02")


@pytest.fixture
async def worker(tmp_path: Path, valkey: Valkey) -> AsyncIterator[WorkerProcess]:
    async with running_worker(tmp_path, valkey.url, "--engine", "sim", *SLOW, threads=0) as running:
        yield running


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens of which no two prompts of different `first` share a block."""
    return [(first * 7919 + i) % 49_000 for i in range(length)]


async def test_serves_as_a_real_worker_does(worker: WorkerProcess) -> None:
    await _identity(worker)
    await _prefix_hits_take_no_time(worker)
    await _words_and_choices(worker)
    await _bad_input_fails_alone(worker)
    await _cancelling_frees_blocks(worker)
    await _stale_beyond_the_queue(worker)
    await _pulls_bring_nothing(worker)
    await worker.wait_idle()
    assert await idle_share(worker.process.pid, below=0.05) < 0.05
    assert _modules(worker.process.pid) == set()


async def _identity(worker: WorkerProcess) -> None:
    source, identity = resolve_model(DEFAULT_MODEL), worker.identity
    text = load_text_model(source)
    assert (identity.model, identity.tokenizer_digest) == (DEFAULT_MODEL, tokenizer_digest(source))
    assert identity.vocab_size == text.tokenizer.get_vocab_size(with_added_tokens=True)
    assert (identity.context_length, identity.total_blocks, identity.pull_address) == (256 * 16, 256, "")
    assert identity.prefill_tokens_per_s == 2048
    assert worker.told["children"] == []


async def _prefix_hits_take_no_time(worker: WorkerProcess) -> None:
    asked = prompt(1025)
    cold, warm = await worker.generate(asked), await worker.generate(asked)
    assert (cold.cached, warm.cached) == (0, 1024)
    assert cold.tokens == warm.tokens
    assert cold.completed is not None
    assert warm.completed is not None
    assert cold.completed.prefill_s >= 0.45
    assert warm.completed.prefill_s < cold.completed.prefill_s


async def _words_and_choices(worker: WorkerProcess) -> None:
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=7, num_logprobs=2)
    answer = await worker.generate(prompt(20, 1), 12, num_choices=2, sampling=sampling)
    again = await worker.generate(prompt(20, 1), 12, num_choices=2, sampling=sampling)
    assert answer.tokens == again.tokens
    assert answer.tokens[0] != answer.tokens[1]
    text = load_text_model(resolve_model(DEFAULT_MODEL)).tokenizer.decode(answer.tokens[0])
    assert re.fullmatch(r"( [a-z]{3,12}){12}", text)
    for token, logprobs in zip(answer.tokens[0], answer.logprobs[0], strict=True):
        assert (logprobs.chosen.token_id, logprobs.chosen.logprob) == (token, 0.0)


async def _bad_input_fails_alone(worker: WorkerProcess) -> None:
    good = asyncio.create_task(worker.generate(prompt(40, 2), 20))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.generate(prompt(4090, 3), 20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len((await good).tokens[0]) == 20


async def _cancelling_frees_blocks(worker: WorkerProcess) -> None:
    call = worker.stub.Generate(worker.request(prompt(64, 4), 2000), metadata=worker.metadata(), timeout=60)
    await call.read()
    call.cancel()
    await worker.wait_idle()


async def _stale_beyond_the_queue(worker: WorkerProcess) -> None:
    """The pool holds 4,096 tokens; what must wait for more than max_queue_s is answered Stale."""
    asked = [worker.generate(prompt(2000, 5 + i), 1) for i in range(4)]
    answers = await asyncio.gather(*asked)
    assert sum(answer.stale is not None for answer in answers) >= 1
    assert sum(answer.completed is not None for answer in answers) >= 2


async def _pulls_bring_nothing(worker: WorkerProcess) -> None:
    """A plan that somebody makes all the same costs nothing but the computing."""
    step = common_pb2.PullStep(
        kind=common_pb2.LOCATION_KIND_WORKER, location_id="other", epoch=1, pull_address="127.0.0.1:1", num_blocks=40
    )
    answer = await worker.generate(prompt(650, 20), 1, pull_plan=[step])
    assert answer.admitted is not None
    assert answer.admitted.cached_tokens == 640, "the pull had begun"
    assert answer.cached == 0
    assert len(answer.tokens[0]) == 1


def _modules(pid: int) -> set[str]:
    """Libraries of torch in a process's memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {name for line in lines if (name := line.rpartition("/")[2]).startswith("libtorch")}


async def test_sigterm_lets_streams_finish(worker: WorkerProcess) -> None:
    request = worker.request(prompt(64), 120)
    messages = aiter(worker.stub.Generate(request, metadata=worker.metadata(), timeout=60))
    while (await anext(messages)).WhichOneof("event") != "tokens":
        pass
    worker.process.send_signal(signal.SIGTERM)
    rest = [message async for message in messages]
    assert rest[-1].completed.usage.output_tokens == 120
    await eventually(lambda: worker.process.poll() == 0)
    assert "Traceback" not in worker.log()


def test_steps_of_a_busy_device_follow_one_another() -> None:
    """What the host needs between steps, and short steps that are not slept for, shift none of those that follow."""
    device = DeviceClock()
    device.start(10.0, 0.1)
    assert device.wait_s(10.04) == pytest.approx(0.06)
    device.start(10.1015, 0.1)
    assert device.busy_until_s == pytest.approx(10.2)
    device.start(10.5, 0.1)
    assert device.busy_until_s == pytest.approx(10.6), "an idle device starts when it is told to"


def run(device: DeviceClock, steps_s: list[float], overhead_s: float) -> float:
    """When the last of `steps_s` has ended, from 5.0 on: sleeps overshoot, and the host needs time after each."""
    now = 5.0
    for step_s in steps_s:
        device.start(now, step_s)
        wait_s = device.wait_s(now)
        assert wait_s == 0 or wait_s >= 0.001
        now += wait_s * 1.02 + overhead_s
    return now


@given(st.lists(st.floats(1e-5, 0.02), min_size=1, max_size=200), st.floats(0, 0.005))
def test_steps_take_no_less_than_their_time(steps_s: list[float], overhead_s: float) -> None:
    """However short they are: but for the last, which may end by a millisecond early."""
    assert run(DeviceClock(), steps_s, overhead_s) >= 5.0 + sum(steps_s) - 0.001


@given(st.lists(st.floats(0.002, 0.02), min_size=1, max_size=200), st.floats(0, 0.0015))
def test_what_the_host_needs_adds_up_to_nothing(steps_s: list[float], overhead_s: float) -> None:
    device = DeviceClock()
    run(device, steps_s, overhead_s)
    assert device.busy_until_s == pytest.approx(5.0 + sum(steps_s))


def test_a_step_takes_what_its_prompts_and_decodes_take() -> None:
    slept: list[float] = []
    runner = SimRunner(TIMES, (7, 8, 9), clock=lambda: 0.0, sleep=slept.append)
    # A chunk of 100 tokens, and two sequences that decode after 50 and 70 tokens.
    starts, ends = np.array([0, 1, 2, 102], np.int32), np.array([50, 70, 100], np.int32)
    empty = np.empty(0, np.int32)
    runner.submit(StepInput(empty, empty, starts, ends, np.empty((3, 0), np.int32), empty))
    rows = [DrawRow(Sampling(seed=3), 0, position, empty, empty) for position in range(50)]
    drawn = runner.draw(rows)
    assert slept == [pytest.approx(0.1 + 0.01 + 0.002 + 120e-5)]
    assert set(drawn.tokens) == {7, 8, 9}
    assert any(a != b for a, b in pairwise(drawn.tokens))
    assert drawn.logprobs == [None] * 50


def settings(*flags: str) -> WorkerSettings:
    loaded = load_settings(WorkerSettings, flags)
    check_settings(loaded)
    return loaded


def test_times_from_flags_or_from_a_calibration(tmp_path: Path) -> None:
    flags = ("--engine", "sim", "--sim-speed", "10")
    assert time_model(settings(*flags, "--sim-decode-step-s", "0.5")) == TimeModel(200_000.0, 0.05, 0.000005)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"prefill_tokens_per_s": 50, "decode_step_s": 1, "decode_sequence_s": 0.1}))
    assert time_model(settings(*flags, "--sim-calibration", str(file))) == TimeModel(500.0, 0.1, 0.01)


@pytest.mark.parametrize("text", ["", "{}", '{"prefill_tokens_per_s": 0, "decode_step_s": 1, "decode_sequence_s": 1}'])
def test_a_calibration_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="sim_calibration="):
        time_model(settings("--engine", "sim", "--sim-calibration", str(file)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sim-transfers", "true"), "sim_transfers=True: needs engine='sim'"),
        (("--sim-speed", "2"), "sim_speed=2.0: needs engine='sim'"),
        (("--engine", "sim", "--threads", "2"), "threads=2: a simulated worker has no such thing"),
        (("--engine", "sim", "--push", "off"), "push='off': a simulated worker"),
        (("--engine", "sim", "--sim-calibration", "f", "--sim-decode-step-s", "1"), "sim_decode_step_s=1.0: sim_cal"),
    ],
)
def test_settings_that_would_do_nothing(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        settings(*flags)


def test_versions_of_one_artifact_have_digests_of_their_own() -> None:
    source = resolve_model(DEFAULT_MODEL)
    model = read_sim_model(source)
    digest = sim_digest(source, model, 2048, settings("--engine", "sim"))
    assert digest == sim_digest(source, model, 2048, settings("--engine", "sim", "--sim-speed", "3"))
    assert revised_digest(digest, "") == digest
    assert len({digest, revised_digest(digest, "1"), revised_digest(digest, "2"), revised_digest(bytes(16), "1")}) == 4


def test_a_folder_gives_its_shape_and_words(tmp_path: Path) -> None:
    config = {
        "max_position_embeddings": 4096,
        "vocab_size": 6,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocabulary = {"a": 0, "Ġhello": 1, "Ġ</s>": 2, "Ġworld": 3, "world": 4, "Ġoutside": 6}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    model = read_sim_model(ModelSource("m", tmp_path))
    assert model.shape == ModelShape(6, 4096, 3, 4, 16)
    assert model.words == (1, 3)
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": None}))
    with pytest.raises(ConfigurationError, match="vocab_size = None"):
        read_sim_model(ModelSource("m", tmp_path))


def test_a_calibration_that_is_missing_ends_the_start_with_one_line(valkey: Valkey) -> None:
    command = [sys.executable, "-m", "services.worker", "--redis-url", valkey.url, "--engine", "sim"]
    ended = subprocess.run(
        [*command, "--sim-calibration", "/nowhere/file.json"],
        env=clean_environment(KVMESH_MESH_SECRET=SECRET),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "sim_calibration='/nowhere/file.json'" in ended.stderr.splitlines()[-1]
