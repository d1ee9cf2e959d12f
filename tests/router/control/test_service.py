"""The control API of real router processes: who may call it, and what it does to grants and model lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvmesh.v1 import control_pb2 as pb
from kvmesh.v1 import control_pb2_grpc, router_pb2

from services.common.bearer_keys import bearer, hash_key
from services.common.redis_client import connect_redis
from services.common.rpc import call_metadata
from tests.router.fake_worker import DIGEST, FakeWorker
from tests.router.test_router import SECRET, RouterProcess, router
from tests.support.valkey import Valkey
from tests.support.waiting import SOON_S, eventually_async

KEY = "an admin's key"
OTHER = b"e" * 16


class Operator:
    """Calls the control API of one router."""

    def __init__(self, process: RouterProcess, key: str = KEY) -> None:
        self.process = process
        self._stub: Any = control_pb2_grpc.ControlStub(process.channel)
        self._metadata = (*call_metadata(SECRET), bearer(key))

    async def call(self, method: str, request: Any) -> Any:
        return await getattr(self._stub, method)(request, timeout=30, metadata=self._metadata)

    async def refused(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, request)
        return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def operators(folder: Path, valkey: Valkey, count: int, *names: str) -> AsyncIterator[list[Operator]]:
    """Operators of `count` routers that know workers of these names."""
    keys = folder / "admin_keys"
    keys.write_text(f"{hash_key(KEY)} tester\n")
    async with AsyncExitStack() as stack:
        client = connect_redis(valkey.url)
        stack.push_async_callback(client.aclose)
        for name in names:
            worker = FakeWorker(client, SECRET, name)
            await worker.start()
            stack.push_async_callback(worker.stop)
        made = []
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            process = await stack.enter_async_context(router(own, valkey.url, "--admin-keys-file", str(keys)))
            await process.workers_ready(len(names))
            made.append(Operator(process))
        yield made


async def test_versions_traffic_and_rollback_reach_every_router(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 2, "w1") as (one, two):
        await one.call("RegisterModel", pb.RegisterModelRequest(name="m", digest=DIGEST.hex()[:8], version="v1"))
        await two.call("RegisterModel", pb.RegisterModelRequest(name="m", digest=OTHER.hex(), version="v2"))
        await one.call("SetTraffic", pb.SetTrafficRequest(name="m", weights={"v1": 90, "v2": 10}))
        (model,) = (await one.call("ListModels", pb.ListModelVersionsRequest())).models
        shown = [(v.version, v.digest, v.weight, v.replicas, v.ready_replicas) for v in model.versions]
        assert shown == [("v1", DIGEST.hex(), 90, 1, 1), ("v2", OTHER.hex(), 10, 0, 0)]
        assert (model.weighted, model.rollback_to) == (True, "v1")
        watch = two.process.stub.WatchModels(router_pb2.WatchModelsRequest(), metadata=two.process.metadata)

        async def weights() -> dict[str, int]:
            snapshot = await asyncio.wait_for(watch.read(), 30)
            return {version.version: version.weight for version in snapshot.traffic[0].versions}

        async def canary() -> bool:
            return await weights() == {"v1": 90, "v2": 10}

        await eventually_async(canary)
        await one.call("Rollback", pb.RollbackRequest(name="m"))
        assert await weights() == {"v1": 100, "v2": 0}
        assert (await two.refused("Rollback", pb.RollbackRequest(name="m")))[0] == grpc.StatusCode.FAILED_PRECONDITION
        assert (await two.refused("UnregisterModel", pb.UnregisterModelRequest(name="m", version="v1")))[0] == (
            grpc.StatusCode.FAILED_PRECONDITION
        )
        left = await two.call("UnregisterModel", pb.UnregisterModelRequest(name="m", version="v2"))
        assert [version.version for version in left.versions] == ["v1"]


async def test_a_drained_worker_gets_nothing_from_any_router(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 2, "w1", "w2") as (one, two):
        view = await one.call("Drain", pb.DrainWorkerRequest(worker_id="w1"))
        assert (view.worker_id, view.drained) == ("w1", True)

        async def drained_there() -> bool:
            return any(view.drained for view in (await two.process.describe()).workers)

        await eventually_async(drained_there, timeout_s=SOON_S)
        for process in (one.process, two.process):
            stream = process.route()
            assert {(await stream.ask([])).grant.worker_id for _ in range(8)} == {"w2"}
        valkey.restart()
        assert {(await stream.ask([])).grant.worker_id for _ in range(8)} == {"w2"}
        await two.call("Undrain", pb.UndrainWorkerRequest(worker_id="w1"))
        assert "w1" in {(await stream.ask([])).grant.worker_id for _ in range(8)}
        status, detail = await two.refused("Drain", pb.DrainWorkerRequest(worker_id="nobody"))
        assert (status, detail) == (grpc.StatusCode.NOT_FOUND, "no worker is called 'nobody'")


async def test_without_redis_changes_are_refused_in_one_line(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 1, "w1") as (one,):
        await one.call("Drain", pb.DrainWorkerRequest(worker_id="w1"))
        valkey.kill()
        status, detail = await one.refused("Undrain", pb.UndrainWorkerRequest(worker_id="w1"))
        assert (status, "redis does not answer" in detail) == (grpc.StatusCode.UNAVAILABLE, True)
        listed = await one.call("List", pb.ListRequest())
        assert [view.drained for view in listed.workers] == [True]


async def test_only_an_admin_key_opens_it(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 1) as (one,):
        stranger = Operator(one.process, "wrong")
        for method, request in (
            ("List", pb.ListRequest()),
            ("ListModels", pb.ListModelVersionsRequest()),
            ("Explain", pb.ExplainRequest(request_id="r")),
            ("Drain", pb.DrainWorkerRequest(worker_id="w1")),
            ("SetTraffic", pb.SetTrafficRequest(name="m")),
        ):
            assert (await stranger.refused(method, request))[0] == grpc.StatusCode.PERMISSION_DENIED
        (tmp_path / "admin_keys").write_text(f"{hash_key('wrong')} another\n")

        async def let_in() -> bool:
            try:
                await stranger.call("List", pb.ListRequest())
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually_async(let_in)
        assert (await one.refused("List", pb.ListRequest()))[0] == grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_keys_file_nobody_is_let_in(tmp_path: Path, valkey: Valkey) -> None:
    async with router(tmp_path, valkey.url) as process:
        status, detail = await Operator(process).refused("List", pb.ListRequest())
    assert (status, detail) == (grpc.StatusCode.PERMISSION_DENIED, "the router has no admin_keys_file")


async def test_a_decision_is_explained(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 1, "w1", "w2") as (one,):
        stream = one.process.route()
        grant = (await stream.ask([])).grant
        await stream.done(grant, ttft_s=0.25)

        async def explained() -> pb.DecisionRecord:
            (record,) = (await one.call("Explain", pb.ExplainRequest(request_id=grant.request_id))).decisions
            return record

        async def ended() -> bool:
            return bool((await explained()).outcome)

        await eventually_async(ended)
        record = await explained()
        assert (record.outcome, record.ttft_s, record.output_tokens) == ("ok", 0.25, 20)
        assert (record.worker_id, record.num_candidates) == (grant.worker_id, 2)
        assert record.candidates[0].worker_id == grant.worker_id
        assert record.candidates[0].terms
        assert record.predicted_ttft_s == grant.predicted_ttft_s
        assert (await one.refused("Explain", pb.ExplainRequest(request_id="r9")))[0] == grpc.StatusCode.NOT_FOUND


async def test_aliases_reach_gateways_survive_redis_and_stand_for_models_alone(tmp_path: Path, valkey: Valkey) -> None:
    async with operators(tmp_path, valkey, 2, "w1") as (one, two):
        await eventually_async(lambda: _answers(one, pb.SetAliasRequest(name="best", model="m")))
        await eventually_async(lambda: _answers(two, pb.SetAliasRequest(name="", model="later")))
        code, _ = await one.refused("SetAlias", pb.SetAliasRequest(name="m", model="other"))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        for name, model in (("better", "best"), ("later", "m"), ("loop", "loop")):
            code, _ = await two.refused("SetAlias", pb.SetAliasRequest(name=name, model=model))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
        code, _ = await one.refused("SetAlias", pb.SetAliasRequest(name="a\nb", model="m"))
        assert code == grpc.StatusCode.INVALID_ARGUMENT

        async def told(operator: Operator, aliases: dict[str, str]) -> bool:
            watch = operator.process.stub.WatchModels(
                router_pb2.WatchModelsRequest(), metadata=operator.process.metadata
            )
            snapshot = await asyncio.wait_for(watch.read(), 30)
            watch.cancel()
            return {alias.name: alias.model for alias in snapshot.aliases} == aliases

        for operator in (one, two):
            await eventually_async(lambda operator=operator: told(operator, {"": "later", "best": "m"}))
        valkey.restart()
        await eventually_async(lambda: _answers(one, pb.SetAliasRequest(name="best", model="")))
        for operator in (one, two):
            await eventually_async(lambda operator=operator: told(operator, {"": "later"}))
        assert [alias.model for alias in (await two.call("ListAliases", pb.ListAliasesRequest())).aliases] == ["later"]

        async def has_pool() -> bool:
            pools = (await two.call("ListPools", pb.ListPoolsRequest())).pools
            return [(pool.model, pool.role, pool.replicas, pool.desired_replicas) for pool in pools] == [
                ("m", "both", 1, 1)
            ]

        await eventually_async(has_pool)


async def _answers(operator: Operator, request: pb.SetAliasRequest) -> bool:
    try:
        await operator.call("SetAlias", request)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True
