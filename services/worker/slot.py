"""The one model that a worker has, is getting, or lacks: idle ▸ copying ▸ loading ▸ ready ▸ draining ▸ idle.

A model that the worker was started with must load, or the worker ends. One that it is told to load later may fail: the
worker stays, idle, and says why. A replica that is lost while it serves ends the worker in either case. What a model
took (engine, mover, their memory, its place in the cache) is given back before the slot is idle again.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import structlog
from opentelemetry import metrics

from services.common.artifacts.errors import ArtifactError
from services.common.models import ModelSource
from services.common.registry import new_epoch
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError
from services.worker.artifacts.store import Acquired, ModelStore
from services.worker.errors import Refused, StartFailed
from services.worker.load_log import LoadLog
from services.worker.replica import Replica, start_replica
from services.worker.serving import Serving, Surroundings, tell_ready

T = TypeVar("T")
# The rest is for the end of the parts.
_SHARE_OF_LEAVING = 0.9
_log = structlog.get_logger()
_failures = metrics.get_meter("kvmesh.worker").create_counter(
    "kvmesh_model_load_failures", description="Models that could not be loaded, by kind of error."
)


class Phase(enum.Enum):
    """What a worker is doing with its model."""

    IDLE = "idle"
    COPYING = "copying"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class ModelSlot:
    """`run` until closed; `load` and `unload` steer it."""

    def __init__(self, around: Surroundings, store: ModelStore, secret: MeshSecret, worker_id: str) -> None:
        self.phase = Phase.IDLE
        self.model = ""
        self.error = ""
        self.replica: Replica | None = None
        self.log = LoadLog()
        self._around = around
        self._store = store
        self._secret = secret
        self._worker_id = worker_id
        self._wanted: ModelSource | None = None
        self._changed = asyncio.Event()
        # Ends the present model, in whatever phase.
        self._end = asyncio.Event()
        self._closed = False
        self._serving: Serving | None = None

    def load(self, source: ModelSource) -> None:
        """Begin to load. Raises Refused while there is a model, or one on its way."""
        if self._closed or self._wanted is not None or self.phase is not Phase.IDLE:
            raise Refused("FAILED_PRECONDITION", f"the worker is {self.phase.value} ({self.model or 'another model'})")
        self._wanted = source
        self._changed.set()

    def unload(self) -> None:
        """Give the model up, or stop getting it. Raises Refused when there is none."""
        if self._wanted is None and self.phase is Phase.IDLE:
            raise Refused("FAILED_PRECONDITION", "the worker has no model")
        self._wanted = None
        self._end.set()

    def close(self) -> None:
        """Give up the model, and end `run`. Idempotent."""
        self._closed = True
        self._end.set()
        self._changed.set()

    async def stop_admitting(self) -> None:
        """No more requests; open ones go on."""
        if self._serving is not None:
            await self._serving.stop_admitting()

    async def run(self, *, required: bool) -> None:
        """Until closed. required: the first model must load.

        Raises StartFailed when that cannot, ChildDied in an ExceptionGroup when a replica is lost.
        """
        while not self._closed:
            self._changed.clear()
            source, self._wanted = self._wanted, None
            if source is None:
                await self._changed.wait()
                continue
            await self._have(source, required=required)
            required = False

    async def _have(self, source: ModelSource, *, required: bool) -> None:
        self.model, self.error = source.name, ""
        self._end.clear()
        if self._closed:
            return
        try:
            await self._load_and_serve(source)
        except (StartFailed, ArtifactError, ConfigurationError) as error:
            if required:
                raise StartFailed(str(error)) from None
            self.error, kind = str(error), error.kind if isinstance(error, StartFailed) else ""
            _failures.add(1, {"kind": kind or type(error).__name__})
            _log.error("the model could not be loaded", model=source.name, reason=self.error)
        finally:
            self.phase, self.replica, self._serving, self.model = Phase.IDLE, None, None, ""
            self._around.service.detach()
            self._around.board.reset(time.monotonic())
            self.log.clear()
        if not self._closed:
            tell_ready(self._around, [])
            _log.info("the worker has no model")

    async def _load_and_serve(self, source: ModelSource) -> None:
        async with AsyncExitStack() as stack:
            replica = await _unless_set(self._start(source, stack), self._end)
            if replica is None:
                return
            self.replica = replica
            self._serving = Serving(self._around, replica)
            self.phase = Phase.READY
            self.log.clear()
            watching = [asyncio.create_task(one) for one in (self._note_draining(), self._leave_with(replica))]
            try:
                await self._serving.run_until(self._end)
            finally:
                for task in watching:
                    task.cancel()

    async def _note_draining(self) -> None:
        await self._end.wait()
        self.phase = Phase.DRAINING

    async def _leave_with(self, replica: Replica) -> None:
        """A rank host that is about to stop takes the replica along: it drains, and the worker ends."""
        within_s = await replica.leaving.wait()
        _log.info("a rank host is about to stop: draining", model=self.model)
        assert self._serving is not None
        self._serving.drain_within(within_s * _SHARE_OF_LEAVING)
        self.close()

    async def _start(self, source: ModelSource, stack: AsyncExitStack) -> Replica:
        """Copy and load; a cached copy that turns out damaged is made anew, once. Raises StartFailed, ArtifactError."""
        for retry in (True, False):
            self.phase = Phase.COPYING
            self.log.begin(source.name, self.phase.value)
            acquired = await self._store.acquire(source, self.log.told)
            try:
                return await self._start_from(acquired, stack)
            except StartFailed as failure:
                if failure.kind != "InvalidWeights" or not await self._store.drop_if_damaged(acquired) or not retry:
                    raise
        raise AssertionError("the second try returns or raises")

    async def _start_from(self, acquired: Acquired, stack: AsyncExitStack) -> Replica:
        async with AsyncExitStack() as tried:
            tried.callback(acquired.close)
            await tried.enter_async_context(self._store.announced(acquired))
            self.phase = Phase.LOADING
            self.log.begin(acquired.source.name, self.phase.value)
            replica = await start_replica(
                self._around.settings,
                acquired.source,
                self._secret,
                worker_id=self._worker_id,
                epoch=new_epoch(),
                stack=tried,
                progress=lambda told: self.log.told(told.done_bytes, told.total_bytes),
            )
            stack.push_async_exit(tried.pop_all())
            return replica


async def _unless_set(work: Coroutine[Any, Any, T], end: asyncio.Event) -> T | None:
    """The result of `work`; None when `end` was set before, `work` being cancelled then."""
    task, ended = asyncio.create_task(work), asyncio.create_task(end.wait())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, ended):
            pending.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)
