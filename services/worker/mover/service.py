"""The mover's life: two links and a transfer endpoint, until a link closes.

Engine and mover speak over one socket, front and mover over another. When either closes, the replica is over and so
is the mover.
"""

from __future__ import annotations

import asyncio
import socket

import structlog

from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.transfer.endpoint import TransferEndpoint
from services.worker.engine_messages import PushTarget
from services.worker.ipc import AsyncLink
from services.worker.mover.config import MoverConfig, MoverSettings
from services.worker.mover.counters import Counters
from services.worker.mover.node_health import NodeHealth
from services.worker.mover.pool import SharedPool
from services.worker.mover.pulls import Puller
from services.worker.mover.pushes import Pusher
from services.worker.mover.serving import PinnedSource, RefusingSink
from services.worker.mover_messages import (
    CancelPull,
    FromEngineToMover,
    MoverReady,
    PinnedSlots,
    PullBlocks,
    PushBlocks,
)

COUNTERS_EVERY_S = 1.0
_log = structlog.get_logger()


async def run_mover(config: MoverConfig, settings: MoverSettings, secret: MeshSecret) -> None:
    """Serve until a link closes. Raises ConfigurationError, or RuntimeError when it cannot listen."""
    block_format = config.block_format()
    heads = config.heads()
    pool = SharedPool(config.pool_fd, config.num_blocks, heads.count * block_format.head_bytes)
    counters = Counters()
    engine: AsyncLink[FromEngineToMover] = await AsyncLink.open(
        socket.socket(fileno=config.engine_fd), FromEngineToMover
    )
    front: AsyncLink[PushTarget] = await AsyncLink.open(socket.socket(fileno=config.front_fd), PushTarget)
    source = PinnedSource(pool, block_format, heads, config.epoch, counters, engine.send)
    mode = config.transport or settings.transport
    endpoint = TransferEndpoint(
        mode,
        secret,
        source,
        RefusingSink(),
        max_operation_s=settings.max_lease_s,
        regions=[pool.region] if pool.region else [],
    )
    server = MeshServer(f"{config.listen_host}:0", secret=secret)
    endpoint.attach(server)
    pull_address = endpoint.listen(f"{config.listen_host}:0", config.advertise_host)
    grpc_address = await server.start(config.advertise_host)
    endpoint.listen_shm(grpc_address)
    await server.set_ready(True)
    front.send(MoverReady(pull_address, grpc_address, endpoint.transport.name))
    try:
        async with asyncio.TaskGroup() as group:
            health = NodeHealth(front.send)
            parts = (group, endpoint.transport, pool, block_format, heads, counters, health, engine.send)
            puller, pusher = Puller(*parts), Pusher(*parts, timeout_s=settings.push_timeout_s)
            group.create_task(_obey_engine(engine, puller, pusher, source))
            group.create_task(_obey_front(front, pusher))
            group.create_task(_report(front, counters, puller, pusher, source))
    except* ConnectionError as ended:
        _log.info("mover ends", reason=str(ended.exceptions[0]))
    await server.stop(0)
    await endpoint.close()


async def _obey_engine(
    engine: AsyncLink[FromEngineToMover], puller: Puller, pusher: Pusher, source: PinnedSource
) -> None:
    while True:
        message = await engine.receive()
        match message:
            case PullBlocks():
                puller.start(message)
            case CancelPull():
                puller.cancel(message)
            case PushBlocks():
                pusher.start(message)
            case PinnedSlots():
                source.pinned(message)


async def _obey_front(front: AsyncLink[PushTarget], pusher: Pusher) -> None:
    while True:
        pusher.set_target(await front.receive())


async def _report(
    front: AsyncLink[PushTarget], counters: Counters, puller: Puller, pusher: Pusher, source: PinnedSource
) -> None:
    while True:
        await asyncio.sleep(COUNTERS_EVERY_S)
        message = counters.message(
            running_pulls=puller.statistics().num_running,
            queued_pushes=pusher.statistics().num_queued,
            open_leases=source.statistics().num_leases,
        )
        front.send(message)
        await front.drain()
