"""A Valkey of a bench's own, outside of the supervisor, so that it can be away for as long as the bench wants."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from services.cli.binaries import valkey_binary
from services.cli.ports import free_ports

_START_TIMEOUT_S, _END_TIMEOUT_S, _POLL_S = 10.0, 10.0, 0.05
# stopped: its connections stay and nothing answers. killed: it comes back empty.
How = Literal["stopped", "killed"]


@dataclass(slots=True)
class OwnRedis:
    """A server without persistence. url: stays the same when it comes back."""

    port: int
    _process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """What services are told."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def away(self, how: How, seconds: float) -> None:
        """Gone for so long, and back."""
        self._process.send_signal(signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        try:
            await asyncio.sleep(seconds)
        finally:
            if how == "stopped":
                self._process.send_signal(signal.SIGCONT)
            else:
                self._process.wait(_END_TIMEOUT_S)
                self._process = _start(self.port)

    def end(self) -> None:
        """Whatever its state."""
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)


@contextmanager
def own_redis() -> Iterator[OwnRedis]:
    """One that accepts connections. Raises MissingBinaryError, RuntimeError."""
    port = next(free_ports())
    redis = OwnRedis(port, _start(port))
    try:
        yield redis
    finally:
        redis.end()


def _start(port: int) -> subprocess.Popen[bytes]:
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--loglevel", "warning")
    process = subprocess.Popen(
        (str(valkey_binary()), *options, "--dir", tempfile.gettempdir()), stdout=subprocess.DEVNULL
    )
    ends_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < ends_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(_POLL_S)
    process.kill()
    raise RuntimeError("Valkey does not start")
