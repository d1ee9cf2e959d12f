"""`python -m services.router`: parse, wire, serve."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

import structlog
from kvmesh.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc

from services.common.process import generated_instance, spare_collections, stop_event, write_ready_file
from services.common.redis_client import RedisHealth, connect_redis
from services.common.registry import RegistryChange, RegistryWatcher
from services.common.rpc import MeshServer
from services.common.security import load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.router.admission import AdmissionConfig
from services.router.config import RouterSettings
from services.router.control.admin_keys import AdminKeys
from services.router.control.plane import ControlPlane
from services.router.control.service import ControlService
from services.router.control.usage import UsageReader
from services.router.decisions import Decisions
from services.router.index.follower import IndexFollower
from services.router.metrics import RouterMetrics, observe_gauges, observe_total
from services.router.news.exchange import NewsExchange
from services.router.placement import PlacementConfig
from services.router.pool_metrics import PoolMetrics
from services.router.service import RouterService
from services.router.watch import WorkerWatcher

# How long a start waits for Redis before it serves without, then for workers, and for gateways to leave at the end.
_FIRST_TRY_S = 3.0
_FIRST_REPORTS_S = 1.0
_LEAVE_S = 1.0
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router; the exit status."""
    try:
        settings = load_settings(RouterSettings, sys.argv[1:] if argv is None else argv)
        instance = settings.instance or generated_instance(settings.service)
        telemetry = process_telemetry(
            settings.service, instance, level=settings.log_level, metrics_listen=settings.metrics_listen
        )
        with telemetry as metrics_address:
            asyncio.run(_run(settings, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except RuntimeError as error:
        return exit_on_configuration_error(ConfigurationError(f"router: {error}"))
    return 0


class _Router:
    """The parts of a router process, wired."""

    def __init__(self, settings: RouterSettings) -> None:
        secret = load_mesh_secret(settings)
        self._settings = settings
        self._client, self._health = connect_redis(settings.redis_url), RedisHealth()
        config = PlacementConfig(settings.policy, AdmissionConfig(settings.max_queue_s))
        self.decisions = Decisions(
            config,
            self._health,
            RouterMetrics(),
            pending_timeout_s=settings.pending_timeout_s,
            explained_requests=settings.explained_requests,
            unload_idle_s=settings.unload_idle_s,
        )
        self._registry = RegistryWatcher(self._client, health=self._health)
        self._follower = IndexFollower(self._client, self.decisions.replica, health=self._health)
        self._watcher = WorkerWatcher(self.decisions.table, secret, self.decisions.holders.changed)
        self._registry.subscribe(self._registry_changed)
        self._control = ControlPlane(self.decisions, self._client, self._health)
        # Settings may give several routers one instance name; its news is told apart by this one.
        router = generated_instance(settings.service)
        self._pools = PoolMetrics(self.decisions.pools)
        self._news = NewsExchange(
            self._client, router, self.decisions.outbox, self.decisions.take_in, health=self._health
        )
        self._server = MeshServer(settings.listen, secret=secret)
        self._server.add(
            router_pb2_grpc.add_RouterServicer_to_server,
            RouterService(self.decisions, self._control.feed),
            router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
        )
        self._server.add(
            control_pb2_grpc.add_ControlServicer_to_server,
            ControlService(
                self._control, self.decisions, UsageReader(self._client), AdminKeys(settings.admin_keys_file)
            ),
            control_pb2.DESCRIPTOR.services_by_name["Control"].full_name,
        )

    async def run(self, metrics_address: str, stop: asyncio.Event) -> None:
        """Serve until `stop`. Raises RuntimeError when the address is taken."""
        try:
            async with asyncio.TaskGroup() as group:
                control = self._control
                parts = (
                    *(self._registry, self._follower, self._watcher, control.feed, control.follower),
                    *(self._news, self._pools),
                )
                tasks = [group.create_task(part.run()) for part in parts]
                await self._serve(metrics_address, stop)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            taken = failures.subgroup(RuntimeError)
            raise (taken.exceptions[0] if taken else failures) from failures
        finally:
            await self._client.aclose()

    async def _serve(self, metrics_address: str, stop: asyncio.Event) -> None:
        # Nobody can ask before: an answer that knows nothing yet would be a wrong one.
        await self._look_around()
        spare_collections()
        settings = self._settings
        address = await self._server.start(settings.advertise_host)
        await self._server.set_ready(True)
        write_ready_file(settings.ready_file, address=address, metrics=metrics_address)
        _log.info("router serves", address=address, metrics=metrics_address, policy=settings.policy)
        await stop.wait()
        await self._server.set_ready(False)
        await self._server.stop(min(settings.drain_deadline_s, _LEAVE_S))
        _log.info("router stopped")

    async def _look_around(self) -> None:
        """Until registry, index and workers are known, or Redis has been tried in vain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_TRY_S):
                await self._health.tried.wait()
                if self._health.connected:
                    await self._registry.synced.wait()
                    await self._follower.synced.wait()
                    await self._control.follower.synced.wait()
        await self._watcher.tried(_FIRST_REPORTS_S)

    def _registry_changed(self, change: RegistryChange) -> None:
        if change.record.kind == "worker":
            self._watcher.registry_changed(change)
        else:
            self.decisions.set_kvstore(change.record, gone=change.gone)


async def _run(settings: RouterSettings, metrics_address: str) -> None:
    router = _Router(settings)
    _observe(router.decisions)
    await router.run(metrics_address, stop_event())


def _observe(decisions: Decisions) -> None:
    table, blocks = decisions.table, decisions.replica.blocks

    def suspects() -> float:
        return float((table.rows["live"] & table.suspect(time.monotonic())).sum())

    observe_gauges(
        {
            "kvmesh_router_index_blocks": ("Distinct blocks in the index.", lambda: len(blocks)),
            "kvmesh_router_index_locations": ("Locations in the index.", lambda: len(decisions.replica.locations)),
            "kvmesh_router_index_holder_sets": ("Distinct holder sets.", lambda: blocks.num_holder_sets),
            "kvmesh_router_index_segments": ("Stretches looked up in one operation.", lambda: blocks.num_segments),
            "kvmesh_router_workers": ("Known workers.", lambda: len(table.workers)),
            "kvmesh_router_drained_workers": (
                "Workers that operators have drained.",
                lambda: float((table.rows["live"] & table.rows["drained"]).sum()),
            ),
            "kvmesh_router_suspect_workers": ("Workers without life signs.", suspects),
            "kvmesh_router_pending_attempts": ("Grants in no report yet.", lambda: float(table.rows["pending"].sum())),
        }
    )
    observe_total(
        "kvmesh_router_pending_timeouts", "Grants that no report ever showed.", lambda: table.pending_timeouts
    )
    observe_total(
        "kvmesh_router_news_dropped",
        "News that gave way to newer before it could be sent.",
        lambda: decisions.outbox.dropped,
    )


if __name__ == "__main__":
    sys.exit(main())
