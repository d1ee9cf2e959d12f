"""Both sides of replication by demand, wired: what is wanted here too often is copied by others, and the reverse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.common.redis_client import RedisClient, RedisHealth
from services.common.registry import LocationRecord, RegistryWatcher
from services.common.security import MeshSecret
from services.common.transfer.protocol import Transport
from services.kvstore.config import KvStoreSettings
from services.kvstore.copier import Copier
from services.kvstore.metrics import ReplicationTotals
from services.kvstore.ram_tier import RamTier
from services.kvstore.replicator import ReplicationLimits, Replicator
from services.kvstore.store import Store


class Replication:
    """`copier` answers other nodes at any time; copies are made and asked for inside `running`."""

    def __init__(self, settings: KvStoreSettings, store: Store, ram: RamTier, transport: Transport) -> None:
        self.totals = ReplicationTotals()
        self.copier = Copier(
            store,
            transport,
            self.totals,
            bytes_per_s=settings.replicate_bytes_per_s,
            busy_leases=settings.busy_leases,
        )
        self._limits = ReplicationLimits(
            settings.replicate_leases, settings.replicate_window_s, settings.replicate_nodes, settings.busy_leases
        )
        self._store = store
        self._ram = ram

    @contextlib.asynccontextmanager
    async def running(
        self, client: RedisClient, health: RedisHealth, own: LocationRecord, secret: MeshSecret
    ) -> AsyncIterator[None]:
        """Copy and ask while the body runs."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.copier.run())]
            if self._limits.leases:
                watcher = RegistryWatcher(client, health=health)
                replicator = Replicator(self._limits, own, self._ram, self.totals, watcher.records, secret)
                self._store.on_served = replicator.served
                tasks += [group.create_task(watcher.run()), group.create_task(replicator.run())]
            try:
                yield
            finally:
                self._store.on_served = None
                self.copier.close()
                for task in tasks:
                    task.cancel()
