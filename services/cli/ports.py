"""Ports for the processes of a local mesh, below the range that the kernel hands to outgoing connections.

A process that is started again must find its port free: one out of the kernel's range might be an outgoing
connection's by then.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from services.cli.errors import StartError

FIRST_PORT = 20_000
LAST_PORT = 32_000


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(host: str = "127.0.0.1") -> Iterator[int]:
    """Distinct free ports, from a random place on so that meshes that start together do not meet. Raises StartError."""
    count = LAST_PORT - FIRST_PORT
    start = random.randrange(count)
    for offset in range(count):
        port = FIRST_PORT + (start + offset) % count
        if is_free(host, port):
            yield port
    raise StartError(f"no free port between {FIRST_PORT} and {LAST_PORT}")
