"""Work on the shared directory, off the event loop: threads of its own, a deadline, one error for all that fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import structlog
from opentelemetry import metrics

from services.gateway.errors import StorageFailed

# What a call takes that reads or writes little, and one that works through a whole file.
SHORT_S, LONG_S = 30.0, 600.0
_THREADS = 4
_failures = metrics.get_meter("kvmesh.gateway").create_counter(
    "kvmesh_gateway_storage_failures", description="Reads and writes of the directory of files that failed, by error."
)
_log = structlog.get_logger("gateway.storage")
P = ParamSpec("P")
T = TypeVar("T")


class Disk:
    """Owner of the threads. What runs past its deadline keeps its thread until the file system answers."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "files")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a short function gives. Raises StorageFailed in place of OSError."""
        return await self._run(SHORT_S, functools.partial(function, *args, **kwargs))

    async def run_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same of one that works through a file."""
        return await self._run(LONG_S, functools.partial(function, *args, **kwargs))

    async def _run(self, within_s: float, call: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except OSError as error:
            _failures.add(1, {"error": type(error).__name__})
            _log.error("storage_failed", error=type(error).__name__, errno=error.errno)
            raise StorageFailed("the files cannot be read or written at the moment") from None

    def close(self) -> None:
        """Take no more work; what runs may end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
