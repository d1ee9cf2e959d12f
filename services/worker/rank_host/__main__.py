"""`kvmesh rank-host`: offers this host to replicas whose worker is on another one. Parses, wires, serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog
from kvmesh.v1 import rank_host_pb2, rank_host_pb2_grpc

from services.common.models import ModelSource, resolve_model
from services.common.process import generated_instance, stop_event, write_ready_file
from services.common.rpc import MeshServer
from services.common.security import MeshSecret, load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.worker.rank_calls import reachable_host
from services.worker.rank_host.config import RankHostSettings
from services.worker.rank_host.places import Places
from services.worker.rank_host.service import RankHostService

_STOP_GRACE_S = 1.0
_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank host; the exit status."""
    try:
        settings = load_settings(RankHostSettings, sys.argv[1:] if argv is None else argv)
        sources = {source.name: source for source in map(resolve_model, settings.models)}
        own_host = reachable_host(settings)
        secret = load_mesh_secret(settings)
        instance = settings.instance or generated_instance("rank-host")
        with process_telemetry(
            "rank_host", instance, level=settings.log_level, metrics_listen=settings.metrics_listen
        ) as metrics_address:
            asyncio.run(_serve(settings, sources, secret, own_host, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except RuntimeError as error:
        sys.stderr.write(f"kvmesh: rank_host: {error}\n")
        return 1
    return 0


async def _serve(
    settings: RankHostSettings,
    sources: dict[str, ModelSource],
    secret: MeshSecret,
    own_host: str,
    metrics_address: str,
) -> None:
    stop, places = stop_event(), Places(settings.max_ranks)
    server = MeshServer(settings.listen, secret=secret)
    (name,) = (service.full_name for service in rank_host_pb2.DESCRIPTOR.services_by_name.values())
    server.add(
        rank_host_pb2_grpc.add_RankHostServicer_to_server,
        RankHostService(settings, sources, places, own_host),
        name,
    )
    address = await server.start(settings.advertise_host)
    await server.set_ready(True)
    write_ready_file(settings.ready_file, address=address, metrics=metrics_address)
    _log.info("rank host ready", address=address, metrics=metrics_address, models=sorted(sources))
    await stop.wait()
    _log.info("stopping")
    await server.set_ready(False)
    await places.leave(settings.drain_deadline_s)
    await server.stop(_STOP_GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
