"""`python -m services.router`: parse, wire, serve."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence

import structlog
from kvmesh.v1 import router_pb2, router_pb2_grpc

from services.common.process import generated_instance, stop_event, write_ready_file
from services.common.redis_client import RedisHealth, connect_redis
from services.common.registry import RegistryChange, RegistryWatcher
from services.common.rpc import MeshServer
from services.common.security import load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.router.config import RouterSettings
from services.router.decisions import Decisions
from services.router.index.follower import IndexFollower
from services.router.metrics import RouterMetrics, observe_gauges
from services.router.models_feed import ModelsFeed
from services.router.placement import PlacementConfig
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
            asyncio.run(_serve(settings, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except RuntimeError as error:
        return exit_on_configuration_error(ConfigurationError(f"router: {error}"))
    return 0


async def _serve(settings: RouterSettings, metrics_address: str) -> None:
    stop = stop_event()
    secret = load_mesh_secret(settings)
    client, health = connect_redis(settings.redis_url), RedisHealth()
    decisions = Decisions(
        PlacementConfig(settings.policy, settings.max_queue_s),
        health,
        RouterMetrics(),
        pending_timeout_s=settings.pending_timeout_s,
    )
    _observe(decisions)
    registry = RegistryWatcher(client, health=health)
    follower = IndexFollower(client, decisions.replica, health=health)
    watcher = WorkerWatcher(decisions.table, secret, decisions.holders.changed)
    registry.subscribe(lambda change: _registry_changed(change, decisions, watcher))
    feed = ModelsFeed(decisions.table)
    server = MeshServer(settings.listen, secret=secret)
    server.add(
        router_pb2_grpc.add_RouterServicer_to_server,
        RouterService(decisions, feed),
        router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.run()) for part in (registry, follower, watcher, feed)]
            await _look_around(health, registry, follower, watcher)
            # Nobody can ask before: an answer that knows nothing yet would be a wrong one.
            address = await server.start(settings.advertise_host)
            await server.set_ready(True)
            write_ready_file(settings.ready_file, address=address, metrics=metrics_address)
            _log.info("router serves", address=address, metrics=metrics_address, policy=settings.policy)
            await stop.wait()
            await server.set_ready(False)
            await server.stop(min(settings.drain_deadline_s, _LEAVE_S))
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        taken = failures.subgroup(RuntimeError)
        raise (taken.exceptions[0] if taken else failures) from failures
    finally:
        await client.aclose()
    _log.info("router stopped")


def _registry_changed(change: RegistryChange, decisions: Decisions, watcher: WorkerWatcher) -> None:
    if change.record.kind == "worker":
        watcher.registry_changed(change)
    else:
        decisions.set_kvstore(change.record, gone=change.gone)


async def _look_around(
    health: RedisHealth, registry: RegistryWatcher, follower: IndexFollower, watcher: WorkerWatcher
) -> None:
    """Until registry, index and workers are known, or Redis has been tried in vain."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_TRY_S):
            await health.tried.wait()
            if health.connected:
                await registry.synced.wait()
                await follower.synced.wait()
    await watcher.tried(_FIRST_REPORTS_S)


def _observe(decisions: Decisions) -> None:
    table, blocks = decisions.table, decisions.replica.blocks

    def suspects() -> float:
        return float((table.rows["live"] & table.suspect(time.monotonic())).sum())

    observe_gauges(
        {
            "kvmesh_router_index_blocks": ("Distinct blocks in the index.", lambda: len(blocks)),
            "kvmesh_router_index_locations": ("Locations in the index.", lambda: len(decisions.replica.locations)),
            "kvmesh_router_index_holder_sets": ("Distinct holder sets.", lambda: blocks.num_holder_sets),
            "kvmesh_router_workers": ("Known workers.", lambda: len(table.workers)),
            "kvmesh_router_suspect_workers": ("Workers without life signs.", suspects),
            "kvmesh_router_pending_attempts": ("Grants in no report yet.", lambda: float(table.rows["pending"].sum())),
            "kvmesh_router_pending_timeouts": ("Grants that no report ever showed.", lambda: table.pending_timeouts),
            "kvmesh_router_redis_connected": ("1 while Redis answers.", lambda: float(decisions.redis_connected)),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
