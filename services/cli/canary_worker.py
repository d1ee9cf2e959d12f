"""The canary's process: an extra child of the supervisor, whose failure is the rollout's and not the mesh's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.cli.child import Child
from services.cli.errors import CliError

STOP_DEADLINE_S = 15.0


class CanaryWorker:
    """`children`: of the supervisor, which looks after it as after the others from start to stop."""

    def __init__(self, child: Child, children: list[Child], changed: Callable[[], None]) -> None:
        self._child = child
        self._children = children
        self._changed = changed
        self._run: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Of its gRPC server."""
        return self._child.spec.address

    @property
    def is_ready(self) -> bool:
        """Whether it serves, in its first life or a later one."""
        return self._child.ready.is_set()

    async def start(self, within_s: float) -> None:
        """Return once it is ready. Raises CliError; `stop` is to be called all the same."""
        self._children.append(self._child)
        self._run = asyncio.create_task(self._child.run())
        ready = asyncio.create_task(self._child.ready.wait())
        try:
            await asyncio.wait({self._run, ready}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._run.done():
            # The StartError with its last words.
            self._run.result()
        self.check()

    def check(self) -> None:
        """Raise CliError unless it is in its first life and ready."""
        if self._child.restarts or self._child.silences or not self._child.ready.is_set():
            raise CliError(f"{self._child.spec.name} is not ready, or its process has ended")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after a deadline; the mesh has it no longer. Idempotent."""
        if self._run is None:
            return
        self._child.request_stop(STOP_DEADLINE_S)
        await asyncio.gather(self._run, return_exceptions=True)
        self._run = None
        self._children.remove(self._child)
        self._changed()
