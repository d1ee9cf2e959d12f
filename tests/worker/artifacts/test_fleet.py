"""Many workers start at once: few read the shared storage, the rest copy from them, and nothing unverified is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvmesh.v1 import artifacts_pb2, artifacts_pb2_grpc

from services.common.artifacts.cache import ModelCache
from services.common.artifacts.chunk_reader import CHUNK_BYTES
from services.common.artifacts.errors import CopyFailed, CopyTimeout, InvalidArtifact
from services.common.artifacts.local_copy import copy_from_source, entry_info
from services.common.artifacts.manifest import make_manifest, read_manifest, verify_artifact, write_manifest
from services.common.keys import KeySpace
from services.common.models import ModelSource
from services.common.redis_client import RedisClient, connect_redis
from services.common.rpc import MeshServer, call_metadata, open_channel
from services.common.security import MeshSecret
from services.worker.artifacts import peer_copy
from services.worker.artifacts.leases import SharedPlaces
from services.worker.artifacts.peer_copy import PeerCopy
from services.worker.artifacts.service import ArtifactService
from services.worker.artifacts.store import ModelStore
from tests.support.processes import clean_environment
from tests.support.valkey import Valkey
from tests.worker.replica import SECRET

SIZE = 2 * CHUNK_BYTES + 1000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "shared" / "m"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(random.Random(1).randbytes(SIZE))
    (path / "config.json").write_text("{}")
    write_manifest(path, make_manifest(path))
    return path


def copier(folder: Path, number: int, told: dict[str, str]) -> subprocess.Popen[str]:
    arguments = {"cache": str(folder / f"machine-{number}"), "source_s": "0.5", **told}
    with (folder / f"copier-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.worker.artifacts.copier", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=clean_environment(),
        )


@contextlib.contextmanager
def fleet(count: int, folder: Path, **told: str) -> Iterator[list[dict[str, Any]]]:
    """Copiers started at once, each on a machine of its own unless `cache` is given; what each said."""
    processes = [copier(folder, number, told) for number in range(count)]
    timer = threading.Timer(90, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        lines = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, [log.read_text() for log in folder.glob("copier-*.log")]
            lines.append(json.loads(line))
        yield lines
    finally:
        timer.cancel()
        for process in processes:
            process.communicate("", timeout=30)


def most_at_once(told: list[dict[str, Any]]) -> int:
    """Most copiers that read the source at the same moment; the clock is the machine's."""
    spans = [one["reading"] for one in told if "reading" in one]
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


def test_a_fleet_fills_from_its_first_copies(tmp_path: Path, source: Path, valkey: Valkey) -> None:
    with fleet(5, tmp_path, source=str(source), redis=valkey.url, readers="2") as told:
        readers = [one for one in told if "reading" in one]
        assert 1 <= len(readers) <= 3, "most come from peers"
        assert most_at_once(told) <= 2
        for one in told:
            manifest = read_manifest(Path(one["path"]))
            assert manifest is not None
            verify_artifact(Path(one["path"]), manifest)


def test_unsealed_models_take_turns_at_the_source(tmp_path: Path, source: Path, valkey: Valkey) -> None:
    """Nobody knows their digest before reading, so peers cannot help; the bound on readers still holds."""
    (source / "kvmesh-manifest.json").unlink()
    with fleet(2, tmp_path, source=str(source), redis=valkey.url, readers="1") as told:
        assert sum("reading" in one for one in told) == 2
        assert most_at_once(told) == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_workers_of_one_machine_copy_once(tmp_path: Path, source: Path, valkey: Valkey, sealed: bool) -> None:
    if not sealed:
        (source / "kvmesh-manifest.json").unlink()
    cache = str(tmp_path / "machine")
    with fleet(2, tmp_path, source=str(source), redis=valkey.url, readers="4", cache=cache) as told:
        assert sum("reading" in one for one in told) == 1
        assert len({one["path"] for one in told}) == 1


async def test_without_redis_everyone_reads_the_source(tmp_path: Path, source: Path) -> None:
    redis = connect_redis(f"unix://{tmp_path}/no.sock")
    caches = [ModelCache(tmp_path / str(number), 10**9) for number in range(2)]
    model = ModelSource("m", source)
    leased = await asyncio.gather(
        *(store_of(cache, redis).acquire(model, lambda done, total: None) for cache in caches)
    )
    assert [one.source.path.parent.parent for one in leased] == [cache.folder for cache in caches]
    for one in leased:
        one.close()
    await redis.aclose()


class Machine:
    """A cache with one copy in it, served; `answers` may spoil what goes out."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.cache = ModelCache(folder, 10**9)
        copy_from_source(self.cache, "m", source, read_manifest(source)).close()

    @contextlib.asynccontextmanager
    async def serving(self, service: ArtifactService | None = None) -> AsyncIterator[str]:
        server = MeshServer("127.0.0.1:0", secret=MeshSecret(SECRET))
        servicer = service or ArtifactService(self.cache, max_serves=2)
        server.add(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, servicer, "kvmesh.v1.Artifacts")
        await server.start()
        try:
            yield server.address
        finally:
            await server.stop(0)


class Spoiling(ArtifactService):
    """Sends a bad second chunk, stops after one, or falls silent."""

    how = ""

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[artifacts_pb2.ArtifactChunk]:
        sent = 0
        async for chunk in super().Fetch(request, context):
            if request.file.endswith(".safetensors") and sent == 1:
                if self.how == "silent":
                    await asyncio.sleep(60)
                if self.how == "short":
                    return
                if self.how == "other":
                    chunk = artifacts_pb2.ArtifactChunk(chunk=0, data=chunk.data)
                if self.how == "flipped":
                    chunk = artifacts_pb2.ArtifactChunk(chunk=chunk.chunk, data=b"x" + chunk.data[1:])
            sent += 1
            yield chunk


@pytest.mark.parametrize("how", ["flipped", "short", "other", "silent", "gone"])
async def test_a_peer_that_fails_is_left_for_the_next(
    tmp_path: Path, source: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_copy, "CHUNK_DEADLINE_S", 1.0)
    holder, mine = Machine(tmp_path / "theirs", source), ModelCache(tmp_path / "mine", 10**9)
    manifest = read_manifest(source)
    assert manifest is not None
    spoiling = Spoiling(holder.cache, max_serves=2)
    spoiling.how = how
    told: list[int] = []
    copy = PeerCopy(mine, manifest, MeshSecret(SECRET), told.append)
    async with holder.serving(spoiling) as bad, holder.serving() as good:
        bad = "127.0.0.1:1" if how == "gone" else bad
        lease = await copy.run([bad, good], entry_info("m", source))
        verify_artifact(lease.path, manifest)
        lease.close()
        assert sum(told) == manifest.size, "what the first gave was kept"
        assert mine.remove(manifest.digest)
        with pytest.raises(CopyFailed, match="none of 1 workers"):
            await PeerCopy(mine, manifest, MeshSecret(SECRET), told.append).run([bad], entry_info("m", source))
    assert (mine.entries(), mine.used_bytes()) == ([], 0)


async def test_serving_is_bounded_and_for_members_only(tmp_path: Path, source: Path) -> None:
    holder = Machine(tmp_path / "theirs", source)
    manifest = read_manifest(source)
    assert manifest is not None
    request = artifacts_pb2.FetchRequest(digest=manifest.digest, file="model.safetensors")
    metadata = call_metadata(MeshSecret(SECRET))
    pausing = Spoiling(holder.cache, max_serves=2)
    pausing.how = "silent"
    async with holder.serving(pausing) as address, open_channel(address) as channel:
        stub = artifacts_pb2_grpc.ArtifactsStub(channel)

        async def code(
            asked: artifacts_pb2.FetchRequest, told: Any = metadata, timeout_s: float | None = 10
        ) -> grpc.StatusCode:
            call = stub.Fetch(asked, metadata=told, timeout=timeout_s)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            return caught.value.code()

        calls = [stub.Fetch(request, metadata=metadata, timeout=30) for _ in range(2)]
        for call in calls:
            assert (await call.read()).chunk == 0
        assert await code(request) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert holder.cache.entries()[0].in_use, "what is being sent is not evicted"
        for call in calls:
            call.cancel()
        other = artifacts_pb2.FetchRequest(digest=manifest.digest, file="../secret")
        async with asyncio.timeout(60):
            while await code(other) != grpc.StatusCode.NOT_FOUND:
                await asyncio.sleep(0.02)
        for unknown in ("0" * 32, "../../lock", ""):
            asked = artifacts_pb2.FetchRequest(digest=unknown, file="config.json")
            assert await code(asked) == grpc.StatusCode.NOT_FOUND
        assert await code(request, timeout_s=None) == grpc.StatusCode.INVALID_ARGUMENT
        assert await code(request, ()) == grpc.StatusCode.UNAUTHENTICATED


def store_of(cache: ModelCache | None, redis: RedisClient, **changes: Any) -> ModelStore:
    places = SharedPlaces(redis, KeySpace().artifacts(), lambda: "me:1")
    settings = {"source_readers": 1, "copy_timeout_s": 30.0, **changes}
    return ModelStore(cache, places, MeshSecret(SECRET), **settings)


async def test_waiting_for_a_place_ends(tmp_path: Path, source: Path, valkey: Valkey) -> None:
    """A reader that died keeps its place for its lease only; whoever waits has a deadline, and gives up whole."""
    redis = connect_redis(valkey.url)
    dead = SharedPlaces(redis, KeySpace().artifacts(), lambda: "dead:1")
    assert await dead.try_read(1)
    cache = ModelCache(tmp_path / "cache", 10**9)
    with pytest.raises(CopyTimeout, match="not copied within 1 s"):
        await store_of(cache, redis, copy_timeout_s=1.0).acquire(ModelSource("m", source), lambda done, total: None)
    held = cache.try_copying(make_manifest(source).digest)
    assert held is not None, "the lock on copying was given back"
    with pytest.raises(CopyTimeout):
        await store_of(cache, redis, copy_timeout_s=0.5).acquire(ModelSource("m", source), lambda done, total: None)
    held.close()
    await redis.zadd(KeySpace().artifacts().readers, {"dead:1": 1})
    acquired = await store_of(cache, redis).acquire(ModelSource("m", source), lambda done, total: None)
    acquired.close()
    assert await redis.zrange(KeySpace().artifacts().readers, 0, -1) == []
    await redis.aclose()


async def test_what_cannot_be_cached_is_read_where_it_lies(tmp_path: Path, source: Path, valkey: Valkey) -> None:
    redis = connect_redis(valkey.url)
    model = ModelSource("m", source)
    small = ModelCache(tmp_path / "small", 2**20)
    for cache in (None, small):
        acquired = await store_of(cache, redis).acquire(model, lambda done, total: None)
        assert (acquired.source, acquired.lease) == (model, None)
    await redis.aclose()


async def test_a_damaged_source_is_refused_and_a_damaged_copy_dropped(
    tmp_path: Path, source: Path, valkey: Valkey
) -> None:
    redis, cache = connect_redis(valkey.url), ModelCache(tmp_path / "cache", 10**9)
    store, told = store_of(cache, redis), list[tuple[int, int]]()
    acquired = await store.acquire(ModelSource("m", source), lambda done, total: told.append((done, total)))
    manifest = read_manifest(source)
    assert manifest is not None
    assert told[-1] == (manifest.size, manifest.size)
    assert not await store.drop_if_damaged(acquired), "a load that failed for another reason costs no copy"
    copy = acquired.source.path / "config.json"
    copy.write_text("[]")
    assert await store.drop_if_damaged(acquired)
    assert cache.entries() == []
    (source / "config.json").write_text("[]")
    with pytest.raises(InvalidArtifact, match=r"config\.json"):
        await store.acquire(ModelSource("m", source), lambda done, total: None)
    assert (cache.entries(), cache.used_bytes()) == ([], 0)
    await redis.aclose()


@pytest.mark.parametrize("part", ["", "entries", "staging", "copying", "leases", "lock"])
async def test_a_cache_that_was_taken_away_is_done_without(
    source: Path, tmp_path: Path, valkey: Valkey, part: str
) -> None:
    """By hand, or because its disk broke: a load then reads the source, and a peer is told that nothing is here."""
    redis = connect_redis(valkey.url)
    cache = ModelCache(tmp_path / "cache", 10**9)
    places = SharedPlaces(redis, KeySpace().artifacts(), lambda: "127.0.0.1:1")
    store = ModelStore(cache, places, MeshSecret(SECRET), source_readers=1, copy_timeout_s=60)
    gone = tmp_path / "cache" / part
    gone.rename(tmp_path / "gone")
    if part == "lock":
        gone.mkdir()
    acquired = await store.acquire(ModelSource("m", source), lambda done, total: None)
    assert (acquired.lease, acquired.source.path) == (None, source)
    if part in ("", "lock"):
        server = MeshServer("127.0.0.1:0", secret=MeshSecret(SECRET))
        serves = ArtifactService(cache, max_serves=1)
        server.add(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, serves, "kvmesh.v1.Artifacts")
        await server.start()
        assert await fetch_status(server.address, source) == grpc.StatusCode.NOT_FOUND
        await server.stop(0.2)
    await redis.aclose()


async def test_a_file_that_was_taken_out_of_an_entry(source: Path, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "cache", 10**9)
    lease = copy_from_source(cache, "m", source, read_manifest(source))
    (lease.path / "config.json").unlink()
    server = MeshServer("127.0.0.1:0", secret=MeshSecret(SECRET))
    serves = ArtifactService(cache, max_serves=1)
    server.add(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, serves, "kvmesh.v1.Artifacts")
    await server.start()
    for _ in range(3):
        assert await fetch_status(server.address, source) == grpc.StatusCode.DATA_LOSS, "and its place is given back"
    await server.stop(0.2)
    lease.close()


async def fetch_status(address: str, source: Path) -> grpc.StatusCode:
    """Of a fetch of the configuration that fails."""
    async with open_channel(address) as channel:
        request = artifacts_pb2.FetchRequest(digest=make_manifest(source).digest, file="config.json")
        call = artifacts_pb2_grpc.ArtifactsStub(channel).Fetch(
            request, metadata=call_metadata(MeshSecret(SECRET)), timeout=20
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    code: grpc.StatusCode = caught.value.code()
    return code
