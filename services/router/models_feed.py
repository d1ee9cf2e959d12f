"""Tells subscribers the list of models when it changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from services.common.own_pauses import TICK_S
from services.router.catalog import Models, list_models
from services.router.control.table import ControlTable
from services.router.workers import WorkerTable

REPEAT_EVERY_S = 5.0


class ModelsFeed:
    """The present list, and a stream of lists for each subscriber."""

    def __init__(self, table: WorkerTable, control: ControlTable) -> None:
        self._table = table
        self._control = control
        self._changed = asyncio.Event()
        self.models = Models()

    async def run(self) -> None:
        """Look for changes until cancelled: a worker may become suspect without anybody saying so."""
        while True:
            now_s = time.monotonic()
            self._table.tick(now_s)
            self.refresh(now_s)
            await asyncio.sleep(TICK_S)

    def refresh(self, now_s: float) -> None:
        """Tell subscribers if anything is different."""
        registered = sorted((name, entry) for name, entry in self._control.models.items() if entry.versions)
        adapters = tuple(sorted(self._control.adapters.items(), key=lambda item: item[0]))
        aliases = tuple(sorted(self._control.aliases.items()))
        models = Models(list_models(self._table, self._table.serving(now_s)), tuple(registered), adapters, aliases)
        if models != self.models:
            self.models = models
            self._changed.set()
            self._changed = asyncio.Event()

    async def snapshots(self) -> AsyncIterator[Models]:
        """The list at once, at every change, and every 5 s."""
        while True:
            self.refresh(time.monotonic())
            changed = self._changed
            yield self.models
            try:
                async with asyncio.timeout(REPEAT_EVERY_S):
                    await changed.wait()
            except TimeoutError:
                continue
