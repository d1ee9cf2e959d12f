"""A real router process between a real Valkey, workers on real gRPC, and a gateway's stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1 import router_pb2, router_pb2_grpc

from services.common.announcer import Tier
from services.common.blocks import BlockId, join_ids
from services.common.keys import KeySpace, location_key
from services.common.redis_client import RedisClient, connect_redis
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from tests.router.fake_worker import DIGEST, FakeWorker
from tests.support.log_lines import log_events
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async

SECRET = MeshSecret("a secret of the mesh")


class RouterProcess:
    """The process and a gateway's view of it."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, str]) -> None:
        self.process = process
        self.ready = ready
        self.channel = open_channel(ready["address"])
        self.stub = router_pb2_grpc.RouterStub(self.channel)
        self.metadata = call_metadata(SECRET)

    async def describe(self) -> router_pb2.DescribeResponse:
        request = router_pb2.DescribeRequest()
        return await self.stub.Describe(request, metadata=self.metadata, timeout=60, wait_for_ready=True)

    def route(self) -> GatewayStream:
        return GatewayStream(self.stub.Route(metadata=self.metadata))

    async def workers_ready(self, count: int) -> None:
        async def ready() -> bool:
            workers = (await self.describe()).workers
            return sum(worker.ready and not worker.suspect for worker in workers) == count

        await eventually_async(ready)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.ready['metrics']}/metrics", timeout=30) as response:
            return str(response.read().decode())


class GatewayStream:
    """Asks and their answers, one at a time."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call
        self._asks = 0

    async def ask(self, ids: list[BlockId], **fields: object) -> router_pb2.RouteResponse:
        self._asks += 1
        ask = router_pb2.Ask(
            request_id=f"r{self._asks}",
            attempt=1,
            model="m",
            model_digest=DIGEST,
            block_ids=join_ids(ids),
            prompt_tokens=len(ids) * 16 + 3,
            max_output_tokens=32,
            num_choices=1,
        )
        ask.MergeFrom(router_pb2.Ask(**fields))  # type: ignore[arg-type]
        await self.call.write(router_pb2.RouteRequest(ask=ask))
        answer = await asyncio.wait_for(self.call.read(), 30)
        assert isinstance(answer, router_pb2.RouteResponse)
        return answer

    async def done(self, grant: router_pb2.Grant, ttft_s: float = 0.1) -> None:
        done = router_pb2.Done(
            request_id=grant.request_id,
            attempt=grant.attempt,
            outcome=router_pb2.OUTCOME_OK,
            ttft_s=ttft_s,
            output_tokens=20,
        )
        await self.call.write(router_pb2.RouteRequest(done=done))


@asynccontextmanager
async def router(folder: Path, url: str, *flags: str) -> AsyncIterator[RouterProcess]:
    ready_file = folder / "router.json"
    environment = clean_environment(KVMESH_MESH_SECRET="a secret of the mesh")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", "--redis-url", url, "--ready-file", str(ready_file), *flags),
        env=environment,
    )
    try:
        await eventually(ready_file.exists)
        running = RouterProcess(process, json.loads(ready_file.read_text()))
        yield running
        await running.channel.close(None)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    client = connect_redis(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
async def workers(client: RedisClient) -> AsyncIterator[list[FakeWorker]]:
    workers = [FakeWorker(client, SECRET, name) for name in ("a", "b")]
    for worker in workers:
        await worker.start()
    yield workers
    for worker in workers:
        await worker.stop()


def chain(length: int) -> list[BlockId]:
    return [BlockId(os.urandom(16)) for _ in range(length)]


async def test_requests_go_where_their_blocks_are(tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]) -> None:
    ids = chain(30)
    async with router(tmp_path, valkey.url) as process:
        await process.workers_ready(2)
        workers[1].announcer.add(ids, Tier.HBM)
        await workers[1].announcer.flushed(60)

        async def indexed() -> bool:
            return (await process.describe()).indexed_blocks == 30

        await eventually_async(indexed)
        stream = process.route()
        grant = (await stream.ask(ids)).grant
        assert (grant.worker_id, grant.local_blocks, grant.worker_epoch) == ("b", 30, workers[1].epoch)
        assert grant.worker_address == workers[1].address
        assert not grant.pull_plan
        await stream.done(grant)
        pulled = (await stream.ask(ids, excluded_workers=["b"])).grant
        assert pulled.worker_id == "a"
        assert [(step.location_id, step.pull_address, step.num_blocks) for step in pulled.pull_plan] == [
            ("b", "b:9", 30)
        ]
        metrics = process.metrics()
        assert "kvmesh_router_ttft_error_seconds_count" in metrics
        assert re.search(r'kvmesh_router_version_attempts_total{digest="[0-9a-f]{12}",.*outcome="ok"} 1', metrics)
        assert re.search(r"^kvmesh_router_version_ttft_seconds_count{digest=", metrics, re.MULTILINE)
        assert re.search(r'kvmesh_router_decisions_total{.*outcome="granted".*policy="predicted_ttft"', metrics)
        stream.call.cancel()


def _divergences(metrics: str) -> float:
    found = re.search(r"^kvmesh_router_index_divergence_total{.*} (.*)$", metrics, re.MULTILINE)
    assert found
    return float(found[1])


async def test_a_digest_that_is_not_the_holders_is_told_as_a_metric(
    tmp_path: Path, valkey: Valkey, client: RedisClient, workers: list[FakeWorker]
) -> None:
    async with router(tmp_path, valkey.url) as process:
        workers[0].announcer.add(chain(5), Tier.HBM)
        await workers[0].announcer.flushed(60)

        async def indexed() -> bool:
            return (await process.describe()).indexed_blocks == 5

        await eventually_async(indexed)
        assert _divergences(process.metrics()) == 0
        location = location_key("worker", "a")
        await client.hset(KeySpace().shard_of(location).meta(location), "xor", bytes(16))
        await eventually(lambda: _divergences(process.metrics()), every_s=0.1)
        # What is known is kept: to be without it would be worse.
        assert (await process.describe()).indexed_blocks == 5


async def test_grants_count_until_reports_show_them(tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]) -> None:
    async with router(tmp_path, valkey.url, "--max-queue-s", "60", "--pending-timeout-s", "15") as process:
        await process.workers_ready(2)
        stream = process.route()
        grants = [(await stream.ask(chain(4))).grant for _ in range(20)]
        assert min(Counter(grant.worker_id for grant in grants).values()) >= 8
        assert sum(view.pending_attempts for view in (await process.describe()).workers) == 20
        for worker in workers:
            for grant in grants[:10]:
                worker.admit(f"{grant.request_id}/1")

        def pending(count: int) -> Callable[[], Awaitable[bool]]:
            async def check() -> bool:
                return sum(view.pending_attempts for view in (await process.describe()).workers) == count

            return check

        await eventually_async(pending(10))
        for grant in grants[10:15]:
            await stream.done(grant)
        await eventually_async(pending(5))
        stream.call.cancel()
        await eventually_async(pending(0))
        assert re.search(r"kvmesh_router_pending_timeouts_total{.*} 5\.0", process.metrics())


async def test_a_worker_that_is_silent_breaks_or_leaves_gets_nothing(
    tmp_path: Path, valkey: Valkey, workers: list[FakeWorker], capfd: pytest.CaptureFixture[str]
) -> None:
    log = ""

    def told() -> list[str]:
        """Why the router gave up streams of reports."""
        nonlocal log
        log += capfd.readouterr().err
        return [line["detail"] for line in log_events(log, '"worker suspect"')]

    async with router(tmp_path, valkey.url) as process:
        await process.workers_ready(2)
        stream = process.route()
        workers[0].silent = True
        await process.workers_ready(1)
        assert {(await stream.ask(chain(2))).grant.worker_id for _ in range(5)} == {"b"}
        workers[0].silent = False
        await process.workers_ready(2)
        before = len(told())
        await workers[0].stop(withdraw=False)
        await process.workers_ready(1)
        # No silence had to be waited for: the end of the stream told.
        await eventually(lambda: told()[before:] == ["UNAVAILABLE"])
        await workers[0].start()
        await process.workers_ready(2)
        await workers[0].stop()

        async def gone() -> bool:
            return [view.worker_id for view in (await process.describe()).workers] == ["b"]

        await eventually_async(gone)
        await workers[0].start()
        await process.workers_ready(2)
        stream.call.cancel()


async def test_redis_going_and_coming_back_fails_no_request(
    tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]
) -> None:
    ids = chain(10)
    async with router(tmp_path, valkey.url) as process:
        await process.workers_ready(2)
        workers[1].announcer.add(ids, Tier.HBM)
        await workers[1].announcer.flushed(60)
        stream = process.route()

        async def found() -> bool:
            grant = (await stream.ask(ids)).grant
            await stream.done(grant)
            return grant.local_blocks + sum(step.num_blocks for step in grant.pull_plan) == 10

        await eventually_async(found)
        valkey.kill()

        async def connected() -> bool:
            return (await process.describe()).redis_connected

        async def lost() -> bool:
            return not await connected()

        await eventually_async(lost)
        assert await found()
        valkey.start()
        await eventually_async(connected)
        for _ in range(50):
            assert await found()
            await asyncio.sleep(0.02)
        await workers[1].announcer.flushed(60)
        stream.call.cancel()


async def test_models_are_told_at_once_and_at_changes(
    tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]
) -> None:
    async with router(tmp_path, valkey.url) as process:
        call = process.stub.WatchModels(router_pb2.WatchModelsRequest(), metadata=process.metadata)

        async def until(replicas: int) -> router_pb2.ServedModel:
            async with asyncio.timeout(60):
                while True:
                    snapshot = await call.read()
                    assert isinstance(snapshot, router_pb2.ModelSnapshot)
                    if [model.ready_replicas for model in snapshot.models] == [replicas]:
                        return snapshot.models[0]

        model = await until(2)
        assert (model.name, model.digest, model.created_s) == ("m", DIGEST, 1_700_000_000)
        workers[0].load.ready = False
        await until(1)
        workers[1].load.draining = True
        await until(0)
        call.cancel()


async def test_what_cannot_be_served_is_refused(tmp_path: Path, valkey: Valkey, workers: list[FakeWorker]) -> None:
    async with router(tmp_path, valkey.url) as process:
        await process.workers_ready(2)
        stream = process.route()
        unknown = (await stream.ask(chain(1), model="other")).refusal
        assert unknown.reason == router_pb2.REFUSAL_REASON_UNKNOWN_MODEL
        nobody = (await stream.ask(chain(1), excluded_workers=["a", "b"])).refusal
        assert (nobody.reason, nobody.retry_after_s) == (router_pb2.REFUSAL_REASON_NO_WORKER, 1.0)
        reasons = {True: router_pb2.REFUSAL_REASON_TOO_LARGE, False: router_pb2.REFUSAL_REASON_NO_WORKER}
        for knows, reason in reasons.items():
            large = await stream.ask(chain(1), max_output_tokens=10**7, knows_too_large=knows)
            assert large.refusal.reason == reason
        crooked = (await stream.ask([BlockId(b"short")])).refusal
        assert crooked.reason == router_pb2.REFUSAL_REASON_UNSPECIFIED
        assert "block ids" in crooked.detail
        assert (await stream.ask(chain(1), policy="round_robin")).grant.policy == "round_robin"
        stream.call.cancel()


async def test_it_serves_without_redis_and_ends_cleanly(tmp_path: Path) -> None:
    async with router(tmp_path, "redis://127.0.0.1:1/0") as process:
        health = health_pb2_grpc.HealthStub(process.channel)
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        stream = process.route()
        refusal = (await stream.ask(chain(1))).refusal
        assert refusal.reason == router_pb2.REFUSAL_REASON_UNKNOWN_MODEL
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.process.wait(), 30) == 0


async def test_strangers_are_turned_away(tmp_path: Path, valkey: Valkey) -> None:
    async with router(tmp_path, valkey.url) as process:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await process.stub.Describe(router_pb2.DescribeRequest(), timeout=30)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
