"""The life of one kvstore node: start everything, register, serve until told to stop, drain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.common.announcer import Announcer
from services.common.generation_follower import GenerationFollower
from services.common.keys import location_key
from services.common.process import stop_event, write_ready_file
from services.common.redis_client import RedisHealth, connect_redis
from services.common.registry import LocationRecord, Registrar, new_epoch
from services.common.rpc import MeshServer
from services.common.security import load_mesh_secret
from services.common.transfer.endpoint import TransferEndpoint
from services.common.transfer.shm_directory import BlockDirectory, ShownDirectory
from services.kvstore.arena import Arena
from services.kvstore.clearing import Clearing
from services.kvstore.config import KvStoreSettings
from services.kvstore.errors import StartFailed
from services.kvstore.metrics import show_at_zero
from services.kvstore.ram_tier import RamTier
from services.kvstore.replication import Replication
from services.kvstore.service import KvStoreServicer
from services.kvstore.ssd_setup import open_log
from services.kvstore.store import Store

_WITHDRAW_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 5.0
# How long after its withdrawal a node takes new pulls and pushes: workers learn of it within some 50 ms.
_LEAVE_S = 0.3
_log = structlog.get_logger()


async def run_node(settings: KvStoreSettings, instance: str, metrics_address: str) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartFailed or ConfigurationError."""
    show_at_zero()
    stop = stop_event()
    secret = load_mesh_secret(settings)
    epoch = new_epoch()
    client, health = connect_redis(settings.redis_url), RedisHealth()
    announcer = Announcer(client, kind="kvstore", location_id=instance, epoch=epoch, health=health)
    arena = _arena(settings)
    directory = BlockDirectory.create(arena.capacity_bytes, epoch) if arena.region else None
    ram = RamTier(arena, owner_bytes=settings.owner_ram_bytes, directory=directory)
    store = Store(
        ram,
        announcer,
        epoch=epoch,
        partial_bytes=settings.partial_bytes,
        partial_max_age_s=settings.partial_max_age_s,
    )
    transfers = TransferEndpoint(
        settings.transport,
        secret,
        store,
        store,
        max_operation_s=settings.max_lease_s,
        regions=[arena.region] if arena.region else [],
        directory=ShownDirectory(directory.region, store.was_read) if directory is not None else None,
    )
    clearing = Clearing(store)
    follower = GenerationFollower(
        client, location_key("kvstore", instance), epoch=epoch, carry_out=clearing.carry_out, health=health
    )
    replication = Replication(settings, store, ram, transfers.transport)
    server = MeshServer(settings.listen, secret=secret)
    server.add(
        kvstore_pb2_grpc.add_KvStoreServicer_to_server,
        KvStoreServicer(store, clearing, replication.copier, replication.totals, instance),
        kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name,
    )
    transfers.attach(server)
    try:
        pull_address = transfers.listen(settings.pull_listen, settings.advertise_host)
        address = await server.start(settings.advertise_host)
        transfers.listen_shm(address)
    except RuntimeError as error:
        raise StartFailed(str(error)) from None
    record = LocationRecord(
        kind="kvstore",
        id=instance,
        epoch=epoch,
        host=settings.advertise_host or address.rpartition(":")[0],
        grpc_address=address,
        pull_address=pull_address,
        transfer_grpc_address=address,
        metrics_address=metrics_address,
        started_s=int(time.time()),
    )
    registrar = Registrar(client, record, health=health)
    log = open_log(settings, secret)
    if log is not None:
        await store.attach_ssd(log, owner_bytes=settings.owner_ssd_bytes, max_age_s=settings.ssd_max_age_s)
    async with _ssd_running(store):
        async with _in_background(announcer, registrar, follower), replication.running(client, health, record, secret):
            await server.set_ready(True)
            write_ready_file(settings.ready_file, address=address, metrics=metrics_address, pull_address=pull_address)
            _log.info("kvstore is ready", address=address, pull_address=pull_address, ram_bytes=settings.ram_bytes)
            await stop.wait()
            _log.info("kvstore is draining")
            await server.set_ready(False)
        # Withdrawn: what was sent before the others knew is still answered.
        await asyncio.sleep(min(_LEAVE_S, settings.drain_deadline_s))
        await transfers.drain(settings.drain_deadline_s)
    await server.stop(settings.drain_deadline_s)
    await transfers.close()
    await client.aclose()


@contextlib.asynccontextmanager
async def _in_background(
    announcer: Announcer, registrar: Registrar, follower: GenerationFollower
) -> AsyncIterator[None]:
    """Register and announce while the body runs, and withdraw both afterwards.

    First what was cleared while this node was away is carried out, so that it is never announced.
    """
    async with asyncio.TaskGroup() as group:
        work = (follower.run(), _after(follower.synced, announcer.run), _after(follower.synced, registrar.run))
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                    await registrar.close()
                    await announcer.close()
                    await follower.close()


async def _after(event: asyncio.Event, run: Callable[[], Awaitable[None]]) -> None:
    """Redis is where both look: `event` comes once it answers, and without it there is nothing to run for."""
    await event.wait()
    await run()


@contextlib.asynccontextmanager
async def _ssd_running(store: Store) -> AsyncIterator[None]:
    """Run the SSD tier while the body runs; what waits to be written is written afterwards."""
    layer = store.ssd
    if layer is None:
        yield
        return
    task = asyncio.create_task(layer.run())
    try:
        yield
        await layer.flush(_FLUSH_TIMEOUT_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await layer.close()


def _arena(settings: KvStoreSettings) -> Arena:
    try:
        return Arena(settings.ram_bytes)
    except OSError as error:
        raise StartFailed(f"ram_bytes={settings.ram_bytes}: {error.strerror}") from None
