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
from services.common.release import RELEASE
from services.common.rpc import MeshServer
from services.common.security import MeshSecret, load_mesh_secret
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
    node = _Node(settings, load_mesh_secret(settings), instance)
    record = await node.listen(metrics_address)
    await node.open_ssd()
    async with _ssd_running(node.store):
        async with node.registered(record):
            await stop.wait()
        await node.drain()
    await node.close()


class _Node:
    """The parts of a node, wired; its methods are called once each, in the order that they stand in."""

    def __init__(self, settings: KvStoreSettings, secret: MeshSecret, instance: str) -> None:
        self._settings = settings
        self._secret = secret
        self._instance = instance
        self._epoch = new_epoch()
        self._redis, self._health = connect_redis(settings.redis_url), RedisHealth()
        self._announcer = Announcer(
            self._redis, kind="kvstore", location_id=instance, epoch=self._epoch, health=self._health
        )
        arena = _arena(settings)
        directory = BlockDirectory.create(arena.capacity_bytes, self._epoch) if arena.region else None
        ram = RamTier(arena, owner_bytes=settings.owner_ram_bytes, directory=directory)
        self.store = Store(
            ram,
            self._announcer,
            epoch=self._epoch,
            partial_bytes=settings.partial_bytes,
            partial_max_age_s=settings.partial_max_age_s,
        )
        self._transfers = TransferEndpoint(
            settings.transport,
            secret,
            self.store,
            self.store,
            max_operation_s=settings.max_lease_s,
            regions=[arena.region] if arena.region else [],
            directory=ShownDirectory(directory.region, self.store.was_read) if directory is not None else None,
        )
        self._clearing = Clearing(self.store)
        self._replication = Replication(settings, self.store, ram, self._transfers.transport)
        self._server = MeshServer(settings.listen, secret=secret)

    async def listen(self, metrics_address: str) -> LocationRecord:
        """Answer calls, not yet ready. Returns what the registry is to say of the node. Raises StartFailed."""
        replication = self._replication
        self._server.add(
            kvstore_pb2_grpc.add_KvStoreServicer_to_server,
            KvStoreServicer(self.store, self._clearing, replication.copier, replication.totals, self._instance),
            kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name,
        )
        self._transfers.attach(self._server)
        host = self._settings.advertise_host
        try:
            pull_address = self._transfers.listen(self._settings.pull_listen, host)
            address = await self._server.start(host)
            self._transfers.listen_shm(address)
        except RuntimeError as error:
            raise StartFailed(str(error)) from None
        return LocationRecord(
            kind="kvstore",
            id=self._instance,
            epoch=self._epoch,
            host=host or address.rpartition(":")[0],
            grpc_address=address,
            pull_address=pull_address,
            transfer_grpc_address=address,
            metrics_address=metrics_address,
            started_s=int(time.time()),
            release=RELEASE,
        )

    async def open_ssd(self) -> None:
        """Take up what the SSD holds, where there is one."""
        settings = self._settings
        log = open_log(settings, self._secret, refused=self.store.totals.ssd_refused)
        if log is not None:
            await self.store.attach_ssd(log, owner_bytes=settings.owner_ssd_bytes, max_age_s=settings.ssd_max_age_s)

    @contextlib.asynccontextmanager
    async def registered(self, record: LocationRecord) -> AsyncIterator[None]:
        """Known to the mesh, announcing and copying, and ready while the body runs; withdrawn afterwards."""
        client, health = self._redis, self._health
        registrar = Registrar(client, record, health=health)
        name = location_key("kvstore", self._instance)
        follower = GenerationFollower(
            client, name, epoch=self._epoch, carry_out=self._clearing.carry_out, health=health
        )
        replicating = self._replication.running(client, health, record, self._secret)
        async with _in_background(self._announcer, registrar, follower), replicating:
            await self._server.set_ready(True)
            addresses = {"address": record.grpc_address, "pull_address": record.pull_address}
            write_ready_file(self._settings.ready_file, metrics=record.metrics_address, **addresses)
            _log.info("kvstore is ready", ram_bytes=self._settings.ram_bytes, **addresses)
            yield
            _log.info("kvstore is draining")
            await self._server.set_ready(False)

    async def drain(self) -> None:
        """Answer what was sent before the others knew of the withdrawal, and wait for what is under way."""
        deadline_s = self._settings.drain_deadline_s
        await asyncio.sleep(min(_LEAVE_S, deadline_s))
        await self._transfers.drain(deadline_s)

    async def close(self) -> None:
        """End everything."""
        await self._server.stop(self._settings.drain_deadline_s)
        await self._transfers.close()
        await self._redis.aclose()


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
            try:
                async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                    await registrar.close()
                    await announcer.close()
                    await follower.close()
            except TimeoutError:
                _log.warning("not withdrawn in time: leases end by themselves", timeout_s=_WITHDRAW_TIMEOUT_S)


async def _after(event: asyncio.Event, run: Callable[[], Awaitable[None]]) -> None:
    """Run what has nothing to do before `event`: both wait for Redis, without a deadline."""
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
