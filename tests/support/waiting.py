"""Waiting for a condition with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Much longer than anything takes on a busy machine: it is spent only where the condition never holds.
PATIENCE_S = 60.0
# What is promised within a second may take a busy machine so long; what else would end the wait is set to be longer.
SOON_S = 10.0


async def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, every_s: float = 0.005) -> None:
    """Return once `condition` is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(every_s)


async def eventually_async(
    condition: Callable[[], Awaitable[object]], timeout_s: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """The same for a condition that must be awaited."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(every_s)
