"""`python -m services.kvstore`: parse, wire, serve."""

from __future__ import annotations

import asyncio
import sys

from services.common.process import end_process, generated_instance
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import process_telemetry
from services.kvstore.config import KvStoreSettings
from services.kvstore.errors import KvStoreError
from services.kvstore.node import run_node


def main() -> int:
    """Run a node; the exit status."""
    try:
        settings = load_settings(KvStoreSettings, sys.argv[1:])
        instance = settings.instance or generated_instance("kvstore")
        with process_telemetry(
            "kvstore", instance, level=settings.log_level, metrics_listen=settings.metrics_listen
        ) as metrics_address:
            asyncio.run(run_node(settings, instance, metrics_address))
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except (KvStoreError, RuntimeError) as error:
        sys.stderr.write(f"kvmesh: kvstore: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
