"""Tells subscribers the list of models when it changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from services.router.catalog import CatalogEntry, list_models
from services.router.own_pauses import TICK_S
from services.router.workers import WorkerTable

REPEAT_EVERY_S = 5.0


class ModelsFeed:
    """The present list, and a stream of lists for each subscriber."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self._changed = asyncio.Event()
        self.models: tuple[CatalogEntry, ...] = ()

    async def run(self) -> None:
        """Look for changes until cancelled: a worker may become suspect without anybody saying so."""
        while True:
            now_s = time.monotonic()
            self._table.tick(now_s)
            self._refresh(now_s)
            await asyncio.sleep(TICK_S)

    def _refresh(self, now_s: float) -> None:
        models = list_models(self._table, self._table.serving(now_s))
        if models != self.models:
            self.models = models
            self._changed.set()
            self._changed = asyncio.Event()

    async def snapshots(self) -> AsyncIterator[tuple[CatalogEntry, ...]]:
        """The list at once, at every change, and every 5 s."""
        while True:
            self._refresh(time.monotonic())
            changed = self._changed
            yield self.models
            try:
                async with asyncio.timeout(REPEAT_EVERY_S):
                    await changed.wait()
            except TimeoutError:
                continue
