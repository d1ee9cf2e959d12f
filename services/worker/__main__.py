"""`kvmesh worker`: the front process of one model replica. Parses, wires, serves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from services.common.artifacts.errors import ArtifactError
from services.common.models import ModelSource, resolve_model
from services.common.process import generated_instance, stop_event
from services.common.security import MeshSecret, load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.worker.config import NO_MODEL, WorkerSettings, check_settings
from services.worker.errors import ChildDied, StartFailed
from services.worker.host import WorkerHost

_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; the exit status."""
    try:
        settings = load_settings(WorkerSettings, sys.argv[1:] if argv is None else argv)
        check_settings(settings)
        source = None if settings.model == NO_MODEL else resolve_model(settings.model)
        secret = load_mesh_secret(settings)
        worker_id = settings.instance or generated_instance("worker")
        with process_telemetry(
            "worker", worker_id, level=settings.log_level, metrics_listen=settings.metrics_listen
        ) as metrics_address:
            return asyncio.run(_serve(settings, source, secret, worker_id, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except (StartFailed, ArtifactError, RuntimeError) as error:
        sys.stderr.write(f"kvmesh: worker: {error}\n")
        return 1


async def _serve(
    settings: WorkerSettings, source: ModelSource | None, secret: MeshSecret, worker_id: str, metrics_address: str
) -> int:
    stop = stop_event()
    host = WorkerHost(settings, secret, worker_id, metrics_address)
    try:
        await host.start()
        await host.run(source, stop)
    except BaseExceptionGroup as group:
        error = first_leaf(group)
        if not isinstance(error, ChildDied):
            raise error from None
        _log.error("the replica is gone", reason=str(error))
        return 1
    finally:
        await host.stop()
    return 0


def first_leaf(group: BaseException) -> BaseException:
    """The first error in nested groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


if __name__ == "__main__":
    sys.exit(main())
