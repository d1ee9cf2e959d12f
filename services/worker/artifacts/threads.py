"""Blocking work in a thread, owned by the task that waits for it: cancelling loses neither thread nor result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from services.common.artifacts.cache import Lease
from services.common.artifacts.file_lock import FileLock

T = TypeVar("T")


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run work that heeds a stop event. Cancelling sets it, waits for the thread's end and closes what it took."""
    stop = threading.Event()
    task: asyncio.Task[T] = asyncio.create_task(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            _close(task.result())
        raise


async def owned(work: Callable[[], T]) -> T:
    """Run short work that may take a lock or a lease."""
    return await in_thread(lambda _: work())


def _close(result: object) -> None:
    """What nobody is there to take."""
    if isinstance(result, Lease | FileLock):
        result.close()
