"""What every test needs that starts a process of ours: a clean environment, free ports."""

from __future__ import annotations

import os
import socket

# What would configure a service from the shell that the tests run in.
_PREFIXES = ("KVMESH_", "OTEL_", "REDIS_")


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what configures a service, and with `extra`."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_PREFIXES)} | extra


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
