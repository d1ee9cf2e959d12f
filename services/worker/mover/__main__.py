"""`python -m services.worker.mover --config JSON`, started by a worker's front."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

import structlog

from services.common.process import die_with_parent, end_process
from services.common.security import load_mesh_secret
from services.common.settings import ConfigurationError, exit_on_configuration_error, load_settings
from services.common.telemetry import configure_logging, configure_tracing
from services.worker.mover.config import MoverSettings, parse_config
from services.worker.mover.service import run_mover


def main() -> int:
    """Run a mover; the exit status."""
    arguments = argparse.ArgumentParser(prog="kvmesh-mover")
    arguments.add_argument("--config", required=True, help="JSON of MoverConfig")
    # The front ends the mover by closing its link; a signal to the whole process group must not come before that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        config = parse_config(arguments.parse_args().config)
        die_with_parent(config.parent_pid)
        settings = load_settings(MoverSettings, [])
        configure_logging("worker", config.worker_id, settings.log_level)
        structlog.contextvars.bind_contextvars(role="mover")
        tracing = configure_tracing("worker", config.worker_id)
        asyncio.run(run_mover(config, settings, load_mesh_secret(settings)))
        if tracing is not None:
            tracing.shutdown()
    except ConfigurationError as error:
        return exit_on_configuration_error(error)
    except RuntimeError as error:
        sys.stderr.write(f"kvmesh: mover: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
