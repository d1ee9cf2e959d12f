"""A worker as real processes, and a client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from services.common.blocks import block_root, cache_namespace, chain_block_ids, join_ids
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from tests.support.mesh import scrape
from tests.support.processes import clean_environment
from tests.support.waiting import eventually_async

SECRET = "a secret of the tests"
START_TIMEOUT_S = 120.0


@dataclass
class Answer:
    """What a Generate stream said, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[common_pb2.PositionLogprobs]] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    admitted: worker_pb2.Admitted | None = None
    stale: worker_pb2.Stale | None = None
    completed: worker_pb2.Completed | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        assert self.completed is not None
        cached = self.completed.usage.cached
        return cached.local + cached.peer + cached.ram + cached.ssd


class WorkerProcess:
    """One running worker."""

    def __init__(self, process: subprocess.Popen[bytes], told: dict[str, Any], log: Path) -> None:
        self.process = process
        self.told = told
        self.secret = MeshSecret(SECRET)
        self.channel = open_channel(told["address"])
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.identity = worker_pb2.WorkerIdentity()
        self._log = log
        self._requests = 0

    def child(self, role: str) -> int:
        """Process id of a child."""
        return next(int(child["pid"]) for child in self.told["children"] if child["role"] == role)

    def log(self) -> str:
        """Everything it wrote to stderr."""
        return self._log.read_text()

    def metrics(self) -> dict[str, float]:
        """Its Prometheus samples."""
        return scrape(self.told["metrics"])

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call from inside the mesh."""
        return call_metadata(self.secret)

    def watch(self) -> Any:
        """A Watch stream."""
        return self.stub.Watch(worker_pb2.WatchRequest(), metadata=self.metadata())

    async def report(self) -> worker_pb2.WorkerReport:
        """The first report of a new watcher, with its identity."""
        async with asyncio.timeout(60):
            call = self.watch()
            report = await call.read()
            call.cancel()
            return report

    async def wait_idle(self) -> None:
        """Until nothing runs, waits or is referenced."""

        async def is_idle() -> bool:
            load = (await self.report()).load
            return not (load.running_requests or load.waiting_requests or load.referenced_blocks)

        await eventually_async(is_idle)

    def request(self, prompt: list[int], max_tokens: int = 8, **changes: Any) -> worker_pb2.WorkerGenerateRequest:
        """A greedy request whose blocks belong to a tenant of the tests."""
        self._requests += 1
        namespace = cache_namespace(tenant=changes.pop("tenant", "t"), generation=0)
        root = block_root(
            self.secret.block_key,
            model_digest=self.identity.model_digest,
            kv_dtype=self.identity.kv_dtype,
            namespace=namespace,
        )
        fields: dict[str, Any] = {
            "request_id": f"r{self._requests}",
            "model_digest": self.identity.model_digest,
            "prompt_token_ids": prompt,
            "block_root": root,
            "prompt_block_ids": join_ids(chain_block_ids(self.secret.block_key, root, prompt)),
            "owner_digest": b"o" * 16,
            "sampling": common_pb2.SamplingParams(temperature=0.0),
            "num_choices": 1,
            "max_tokens": max_tokens,
        }
        return worker_pb2.WorkerGenerateRequest(**(fields | changes))

    async def generate(
        self, prompt: list[int], max_tokens: int = 8, *, timeout_s: float = 60, **changes: Any
    ) -> Answer:
        """Run a request to its end. Raises AioRpcError."""
        return await self.send(self.request(prompt, max_tokens, **changes), timeout_s)

    async def send(self, request: worker_pb2.WorkerGenerateRequest, timeout_s: float = 60) -> Answer:
        """Run a given request to its end."""
        answer = Answer()
        async for response in self.stub.Generate(request, metadata=self.metadata(), timeout=timeout_s):
            _note(answer, response)
        return answer


def _note(answer: Answer, response: worker_pb2.WorkerGenerateResponse) -> None:
    assert answer.completed is None, "nothing follows the terminal message"
    match response.WhichOneof("event"):
        case "admitted":
            answer.admitted = response.admitted
        case "stale":
            answer.stale = response.stale
        case "tokens":
            answer.tokens.setdefault(response.tokens.choice, []).extend(response.tokens.token_ids)
            answer.logprobs.setdefault(response.tokens.choice, []).extend(response.tokens.logprobs)
        case "finish":
            answer.finishes[response.finish.choice] = response.finish.reason
        case "completed":
            answer.completed = response.completed


@contextlib.asynccontextmanager
async def running_worker(
    folder: Path, redis_url: str, *flags: str, threads: int = 2, env: dict[str, str] | None = None
) -> AsyncIterator[WorkerProcess]:
    """A ready worker with the default model; killed at the end if it still runs. threads 0: as many as it likes."""
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log = folder / "ready.json", folder / "worker.log"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.worker", "--redis-url", redis_url, "--ready-file", str(ready_file)]
    pool = [] if "--num-blocks" in flags else ["--num-blocks", "256"]
    team = ["--threads", str(threads)] if threads else []
    instance = [] if "--instance" in flags else ["--instance", "w"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, *instance, *team, *pool, *flags],
            env=clean_environment(KVMESH_MESH_SECRET=SECRET, **(env or {})),
            stderr=stderr,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not ready_file.exists():
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        worker = WorkerProcess(process, json.loads(ready_file.read_text()), log)
        worker.identity = (await worker.report()).identity
        yield worker
        await worker.channel.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(30)
