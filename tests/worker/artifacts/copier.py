"""A stand-in for a starting worker: acquires a model through the real store and serves its cache over real gRPC.

`python -m tests.worker.artifacts.copier JSON`: prints a line of JSON when it has the model (when it read the source and
how), then serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from kvmesh.v1 import artifacts_pb2_grpc

from services.common.artifacts.cache import ModelCache
from services.common.keys import KeySpace
from services.common.models import ModelSource
from services.common.redis_client import connect_redis
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.telemetry import configure_logging
from services.worker.artifacts import store as store_module
from services.worker.artifacts.leases import SharedPlaces
from services.worker.artifacts.service import ArtifactService
from services.worker.artifacts.store import ModelStore
from tests.worker.replica import SECRET


async def main(told: dict[str, str]) -> None:
    """Acquire, say so, serve."""
    source, redis, secret = Path(told["source"]), connect_redis(told["redis"]), MeshSecret(SECRET)
    cache = ModelCache(Path(told["cache"]), 10**9)
    server = MeshServer("127.0.0.1:0", secret=secret)
    serves = ArtifactService(cache, max_serves=4)
    server.add(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, serves, "kvmesh.v1.Artifacts")
    await server.start()
    places = SharedPlaces(redis, KeySpace().artifacts(), lambda: server.address)
    store = ModelStore(cache, places, secret, source_readers=int(told["readers"]), copy_timeout_s=60)
    seen: dict[str, object] = {"address": server.address}
    original = store_module.copy_from_source

    def slow_source(*arguments: object, **named: object) -> object:
        """The real copy, from a disk that takes its time, noting when."""
        begun_s = time.monotonic()
        time.sleep(float(told["source_s"]))
        lease = original(*arguments, **named)  # type: ignore[arg-type]
        seen["reading"] = [begun_s, time.monotonic()]
        return lease

    store_module.copy_from_source = slow_source  # type: ignore[assignment]
    acquired = await store.acquire(ModelSource("m", source), lambda done, total: None)
    assert acquired.lease is not None
    async with store.announced(acquired):
        print(json.dumps({**seen, "path": str(acquired.source.path)}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    acquired.close()
    await server.stop(0.2)
    await redis.aclose()


if __name__ == "__main__":
    configure_logging("worker", "copier", "INFO")
    asyncio.run(main(json.loads(sys.argv[1])))
