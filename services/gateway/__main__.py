"""`kvmesh gateway`: parse, wire, serve.

Helper processes import this module again when they start; what they do not need is imported inside `main`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM; the process's exit status."""
    import asyncio

    from services.common.process import generated_instance, stop_event, write_ready_file
    from services.common.security import MeshSecret, load_mesh_secret
    from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
    from services.common.telemetry import process_telemetry
    from services.gateway.config import GatewaySettings
    from services.gateway.server import GatewayServer

    async def serve(settings: GatewaySettings, secret: MeshSecret, instance: str, metrics_address: str) -> None:
        stop = stop_event()
        async with GatewayServer(settings, secret, instance).running() as server:
            write_ready_file(settings.ready_file, address=server.address, metrics=metrics_address)
            await server.run_until(stop)
            await server.drain(tell=not stop.interrupted)

    try:
        settings = load_settings(GatewaySettings, sys.argv[1:] if argv is None else argv)
        instance = settings.instance or generated_instance("gateway")
        secret = load_mesh_secret(settings)
        with process_telemetry(
            "gateway", instance, level=settings.log_level, metrics_listen=settings.metrics_listen
        ) as metrics_address:
            asyncio.run(serve(settings, secret, instance, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except RuntimeError as error:
        return exit_on_configuration_error(ConfigurationError(f"gateway: {error}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
