"""The connection to Redis (or Valkey): no hidden retries, one log line at loss and one at recovery.

Callers own their retry loops: `Backoff` paces them and `RedisHealth` reports for the whole process. Callers also put
`asyncio.timeout(COMMAND_TIMEOUT_S)` around every command. The client's own socket timeout is off: it waits with
`asyncio.wait_for`, which in Python 3.11 loses a cancellation that arrives in the moment a write completes, so that a
cancelled loop would go on for ever.
"""

from __future__ import annotations

import asyncio
import random

import redis.asyncio
import structlog
from opentelemetry import metrics
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.common.settings import ConfigurationError

REDIS_ERRORS = (RedisError, OSError, TimeoutError)
COMMAND_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 1.0
# Below the command timeout: a blocking read is a command like any other.
BLOCK_MS = 1_000

_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.redis")
_losses = _meter.create_counter("kvmesh_redis_losses", description="Times that Redis was lost.")
_connected = _meter.create_up_down_counter("kvmesh_redis_connected", description="1 while Redis answers.")

RedisClient = redis.asyncio.Redis


def connect_redis(url: str) -> RedisClient:
    """A client that connects at its first command. Raises ConfigurationError for a URL that means nothing."""
    try:
        return RedisClient.from_url(
            url,
            protocol=3,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigurationError(f"redis_url: {error}") from None


class RedisHealth:
    """Whether Redis answered lately, for one process. All users of a client share one."""

    def __init__(self) -> None:
        self.connected = False
        # Set once Redis has answered or failed to.
        self.tried = asyncio.Event()
        self._reported_loss = False

    def answered(self) -> None:
        """A command has succeeded."""
        if not self.connected:
            _connected.add(1)
            if self._reported_loss:
                _log.info("redis is back")
        self.connected = True
        self.tried.set()
        self._reported_loss = False

    def lost(self, error: BaseException) -> None:
        """A command has failed."""
        if self.connected:
            _connected.add(-1)
        if not self._reported_loss:
            _losses.add(1)
            _log.warning("redis does not answer", error=type(error).__name__, detail=str(error)[:200])
        self.connected = False
        self.tried.set()
        self._reported_loss = True


class Backoff:
    """Growing, jittered pauses between attempts."""

    def __init__(self, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """An attempt has succeeded."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._most_s)
        return pause_s
