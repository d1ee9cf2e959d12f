"""Turns of the lines of one batch at one gateway: as many at a time as its pace allows, and all batches together may.

Lines without a turn wait here; those with one wait in the fair line behind everybody else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.batches.pace import Pace


class Turns:
    """Owner of one batch's turns. shared: those of all batches of the gateway."""

    def __init__(self, pace: Pace, shared: asyncio.Semaphore) -> None:
        self._pace = pace
        self._shared = shared
        self._changed = asyncio.Condition()
        self.num_running = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One turn, for the time of the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running < self._pace.limit)
            self.num_running += 1
        try:
            while (pause_s := self._pace.pause_s(time.monotonic())) > 0:  # noqa: ASYNC110
                await asyncio.sleep(pause_s)
            async with self._shared:
                yield
        finally:
            self.num_running -= 1
            await self._tell()

    def answered(self) -> None:
        """A line of a turn was answered."""
        self._pace.answered()

    def refused(self, retry_after_s: float) -> None:
        """It was refused for now."""
        self._pace.refused(retry_after_s, time.monotonic())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
