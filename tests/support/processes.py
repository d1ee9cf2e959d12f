"""What every test needs that starts a process of ours: a clean environment, free ports."""

from __future__ import annotations

import os
import random

from services.cli.ports import FIRST_PORT, is_free

# What would configure a service from the shell that the tests run in.
_PREFIXES = ("KVMESH_", "OTEL_", "REDIS_")
_LOWEST_PORT = 10_000
# Not the generator that hypothesis seeds.
_random = random.SystemRandom()


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what configures a service, and with `extra`."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_PREFIXES)} | extra


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that meshes choose and that outgoing connections get.

    So what listens there finds it free again when it is started anew.
    """
    while not is_free("127.0.0.1", port := _random.randrange(_LOWEST_PORT, FIRST_PORT)):
        pass
    return port
