"""A replica whose second stage is on another host, all of it real processes: same answers, one life, one end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvmesh.v1 import rank_host_pb2, rank_host_pb2_grpc

from bench.tiny_model import write_tiny_model
from services.common.release import RELEASE
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from tests.support.log_lines import log_events
from tests.support.mesh import total
from tests.support.processes import clean_environment, free_port
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE_S, SOON_S, eventually
from tests.worker.rank_host.processes import OTHER_HOST, RankHostProcess, running_rank_host
from tests.worker.replica import SECRET, WorkerProcess, running_worker
from tests.worker.test_process import prompt
from tests.worker.test_transfers_process import pull_step, registry

_START_TIMEOUT_S = 240


# Silence would be noticed long after an end, and what runs when a drain begins has time to end.
DRAIN = ("--drain-deadline-s", "120")
PATIENT = ("--child-silence-s", "60", *DRAIN)
TOKENS = 600


def two_stages(host: RankHostProcess, *flags: str) -> tuple[str, ...]:
    return ("--pipeline-parallel", "2", "--rank-hosts", host.address, *flags)


@contextlib.asynccontextmanager
async def tiny_replica(tmp_path: Path, valkey: Valkey) -> AsyncIterator[tuple[WorkerProcess, RankHostProcess]]:
    """Of two stages, whose second one's host has the files in a place of its own."""
    model = write_tiny_model(tmp_path / "here")
    other = Path(shutil.copytree(model, tmp_path / "there"))
    async with running_rank_host(tmp_path / "host", "--models", f"tiny={other}", *DRAIN) as host:
        stages = two_stages(host, "--model", f"tiny={model}", *PATIENT)
        async with running_worker(tmp_path / "w", valkey.url, *stages, threads=1) as worker:
            yield worker, host


def rank_pid(worker: WorkerProcess) -> int:
    (started,) = log_events(worker.log(), '"rank started"')
    return int(started["pid"])


def is_there(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def seconds_until_withdrawn(watch: Any) -> float:
    """Until a watcher of the worker is told no more."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await watch.read() is not grpc.aio.EOF:
                pass
    return time.monotonic() - began_s


async def test_answers_and_blocks_are_those_of_one_process(tmp_path: Path, valkey: Valkey) -> None:
    mine, theirs = prompt(100), prompt(100, 7)
    async with (
        registry(valkey.url) as watcher,
        running_rank_host(tmp_path / "host") as host,
        running_worker(tmp_path / "a", valkey.url, *two_stages(host), threads=1) as spread,
        running_worker(tmp_path / "b", valkey.url, "--instance", "b", threads=1) as alone,
    ):
        await eventually(lambda: {"worker/w", "worker/b"} <= watcher.records.keys())
        assert spread.identity.model_digest == alone.identity.model_digest
        assert [child["role"] for child in spread.told["children"]] == ["engine", "mover"]
        found, expected = await spread.generate(mine, 12), await alone.generate(theirs, 12)
        lent = await alone.generate(mine, 12, pull_plan=[pull_step(watcher.records["worker/w"], 6)])
        assert lent.cached == 96, alone.log()
        assert lent.tokens == found.tokens
        borrowed = await spread.generate(theirs, 12, pull_plan=[pull_step(watcher.records["worker/b"], 6)])
        assert borrowed.cached == 96, spread.log()
        assert borrowed.tokens == expected.tokens
        assert (await alone.generate(mine, 12, tenant="computed anew")).tokens == found.tokens
        await spread.wait_idle()
        await alone.wait_idle()
        assert "Traceback" not in spread.log() + host.log()


async def test_a_killed_rank_ends_its_replica_and_another_one_is_formed(tmp_path: Path, valkey: Valkey) -> None:
    async with tiny_replica(tmp_path, valkey) as (worker, host):
        before = await worker.generate(prompt(40), 8)
        watch = worker.watch()
        await watch.read()
        os.kill(rank_pid(worker), signal.SIGKILL)
        assert await seconds_until_withdrawn(watch) < SOON_S
        assert await asyncio.to_thread(worker.process.wait, PATIENCE_S) == 1
        assert "the rank1 on rank host" in worker.log()
        assert "ended with status -9" in worker.log()
        stages = two_stages(host, "--model", f"tiny={tmp_path / 'here'}")
        async with running_worker(tmp_path / "again", valkey.url, *stages, threads=1) as again:
            assert (await again.generate(prompt(40), 8)).tokens == before.tokens
            assert host.num_ranks() == 1


async def test_a_killed_host_ends_the_replica_and_its_rank(tmp_path: Path, valkey: Valkey) -> None:
    async with tiny_replica(tmp_path, valkey) as (worker, host):
        watch, pid = worker.watch(), rank_pid(worker)
        await watch.read()
        host.process.kill()
        assert await seconds_until_withdrawn(watch) < SOON_S
        assert await asyncio.to_thread(worker.process.wait, PATIENCE_S) == 1
        await eventually(lambda: not is_there(pid))


async def test_a_killed_or_stopped_worker_leaves_no_rank(tmp_path: Path, valkey: Valkey) -> None:
    async with tiny_replica(tmp_path, valkey) as (worker, host):
        pid = rank_pid(worker)
        worker.process.kill()
        await eventually(lambda: not is_there(pid))
        await eventually(lambda: host.num_ranks() == 0)
        stages = two_stages(host, "--model", f"tiny={tmp_path / 'here'}", "--child-silence-s", "10")
        async with running_worker(tmp_path / "again", valkey.url, *stages, threads=1) as again:
            again.process.send_signal(signal.SIGSTOP)
            await eventually(lambda: host.ends().get("silence") == 1)
            again.process.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(again.process.wait, PATIENCE_S) == 1


async def test_a_host_that_is_told_to_stop_has_the_replica_drain(tmp_path: Path, valkey: Valkey) -> None:
    async with tiny_replica(tmp_path, valkey) as (worker, host):
        running = asyncio.create_task(worker.generate(prompt(40), TOKENS))
        await eventually(lambda: total(worker.metrics(), "kvmesh_worker_running_requests") > 0)
        host.process.terminate()
        assert not running.done()
        answer = await running
        assert sum(map(len, answer.tokens.values())) == TOKENS
        assert await asyncio.to_thread(worker.process.wait, PATIENCE_S) == 0
        assert await asyncio.to_thread(host.process.wait, PATIENCE_S) == 0
        assert host.ends() == {"told": 1}


def refused_start(folder: Path, valkey: Valkey, address: str, *flags: str) -> str:
    """What a worker that cannot start says."""
    command = [sys.executable, "-m", "services.worker", "--redis-url", valkey.url, "--threads", "1"]
    command += ["--pipeline-parallel", "2", "--rank-hosts", address, *flags]
    ended = subprocess.run(
        command,
        env=clean_environment(KVMESH_MESH_SECRET=SECRET),
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        timeout=_START_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]


async def test_starts_that_are_refused_say_why(tmp_path: Path, valkey: Valkey) -> None:
    model = write_tiny_model(tmp_path / "here")
    other = Path(shutil.copytree(model, tmp_path / "there"))
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    tiny = ("--model", f"tiny={model}")
    async with (
        running_rank_host(tmp_path / "host", "--models", f"tiny={other}") as host,
        running_rank_host(tmp_path / "foreign", secret="a secret of another mesh") as foreign,
    ):

        async def said(address: str, *flags: str) -> str:
            return await asyncio.to_thread(refused_start, tmp_path, valkey, address, *flags)

        assert "differently each time on the ranks' hosts" in await said(host.address, *tiny)
        assert f"rank host {foreign.address}: not a member of this mesh" in await said(foreign.address, *tiny)
        assert "model 'smollm2-135m' is not here; models: tiny" in await said(host.address)
        assert host.num_ranks() == 0
        nobody = f"{OTHER_HOST}:{free_port()}"
        assert f"rank host {nobody} does not answer within" in await said(nobody, *tiny)


def a_start(**changes: object) -> rank_host_pb2.StartRank:
    fields = {"release": RELEASE, "worker_id": "w", "epoch": 1, "rank": 1, "model": "tiny", "engine_config": b"{}"}
    return rank_host_pb2.StartRank(**(fields | changes))  # type: ignore[arg-type]


async def test_calls_that_are_no_starts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "here")
    async with running_rank_host(tmp_path / "host", "--models", f"tiny={model}") as host:
        channel = open_channel(host.address)
        stub = rank_host_pb2_grpc.RankHostStub(channel)

        async def refusal(*controls: rank_host_pb2.RankControl) -> tuple[grpc.StatusCode, str]:
            call = stub.Run(iter(controls), metadata=call_metadata(MeshSecret(SECRET)), timeout=PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            return refused.value.code(), refused.value.details() or ""

        def start(**changes: object) -> rank_host_pb2.RankControl:
            return rank_host_pb2.RankControl(start=a_start(**changes))

        beat = rank_host_pb2.RankControl(beat=rank_host_pb2.RankBeat())
        assert await refusal(beat) == (grpc.StatusCode.INVALID_ARGUMENT, "the call begins with no start")
        assert await refusal() == (grpc.StatusCode.INVALID_ARGUMENT, "the call begins with no start")
        code, detail = await refusal(start(release="0.0.1"))
        assert (code, detail) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"release {RELEASE} runs here, '0.0.1' at the worker",
        )
        assert (await refusal(start()))[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert (await refusal(start(model="other")))[0] == grpc.StatusCode.NOT_FOUND
        await channel.close(None)
