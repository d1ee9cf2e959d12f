"""Starts and ends the workers of models that are loaded on demand, as the routers' pools say what requests wait for.

The channel is the control API that autoscalers' metrics are also made of: asked twice a second, with a deadline. While
no router answers nothing is started, and nothing is ended unless all of them answer. An idle worker is drained before
it is told to end; a request that was faster than the drain has it stay. A process that dies while it loads is started
again; one that cannot start is left alone for a while, and the requests for it meet their own deadlines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kvmesh.v1 import control_pb2 as pb

from services.cli.child import Child
from services.cli.control_client import ControlClient
from services.cli.errors import CliError, StartError
from services.cli.loading_plan import PoolState, changes, merged
from services.cli.plan import ProcessSpec
from services.cli.version_traffic import VersionTraffic
from services.common.settings import ConfigurationError

_EVERY_S = 0.5
_STOP_DEADLINE_S = 15.0
# A request that had come before the drain has so long to end; longer ones keep the worker.
_DRAIN_WITHIN_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 2.0, 60.0


class ModelLoader:
    """`run` until cancelled. children: the supervisor's, where loaded ones are while they live."""

    def __init__(
        self,
        specs: Mapping[str, ProcessSpec],
        *,
        max_loaded: int,
        client: Callable[[], ControlClient],
        new_child: Callable[[ProcessSpec], Child],
        children: list[Child],
        paused: Callable[[], bool],
        changed: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        """specs: of the worker of each model. paused: whether others are replacing processes. report: for a person."""
        self._specs = specs
        self._max_loaded = max_loaded
        self._new_child = new_child
        self._children = children
        self._paused = paused
        self._changed = changed
        self._report = report
        self._client = client
        self._loaded: dict[str, Child] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        # Of models whose worker could not start: when to try again, and the pause after the next failure.
        self._barred: dict[str, tuple[float, float]] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled; `ended` waits for the processes."""
        while True:
            if not self._paused():
                try:
                    await self._round()
                    self._note_trouble("")
                except (CliError, ConfigurationError, OSError) as error:
                    # Secrets are read each time, so that they may change; what cannot be read now may be later.
                    self._note_trouble(str(error))
            await asyncio.sleep(_EVERY_S)

    async def ended(self) -> None:
        """Once every worker that was loaded has ended; others tell them to."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._lives, *self._leaving.values(), return_exceptions=True)

    async def _round(self) -> None:
        """Raises CliError when no router answers."""
        pools, is_whole = await self._pools()
        now_s = time.monotonic()
        known = [model for model in self._specs if self._barred.get(model, (0.0, 0.0))[0] <= now_s]
        may_go = {
            model: child.ready.is_set() and model not in self._leaving and is_whole
            for model, child in self._loaded.items()
        }
        planned = changes(known, pools, may_go, self._max_loaded)
        for model in planned.load:
            self._load(model)
        for model in planned.unload:
            self._report(f"{model} is idle; its worker {self._specs[model].name} goes")
            task = self._leaving[model] = asyncio.create_task(self._unload(model))
            task.add_done_callback(lambda _, model=model: self._leaving.pop(model, None))  # type: ignore[misc]

    async def _pools(self) -> tuple[dict[str, PoolState], bool]:
        """By model, as all routers that answer see them, and whether all did."""
        replies, errors = await self._client().all_of(
            lambda stub, options: stub.ListPools(pb.ListPoolsRequest(), **options)
        )
        if not replies:
            raise CliError(f"no router says what requests wait for: {', '.join(errors)}")
        seen: dict[str, list[PoolState]] = {}
        for reply in replies.values():
            for pool in reply.pools:
                state = PoolState(
                    pool.waiting_requests, pool.running_requests, pool.idle_s, is_wanted=pool.desired_replicas > 0
                )
                seen.setdefault(pool.model, []).append(state)
        return {model: merged(states) for model, states in seen.items()}, not errors

    def _load(self, model: str) -> None:
        child = self._new_child(self._specs[model])
        self._report(f"requests wait for {model}; starting {child.spec.name}")
        self._loaded[model] = child
        self._children.append(child)
        task = asyncio.create_task(self._live(model, child))
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _live(self, model: str, child: Child) -> None:
        """From the start of a worker to its end."""
        started_s = time.monotonic()
        ready = asyncio.create_task(self._until_ready(model, child, started_s))
        try:
            await child.run()
        except (StartError, OSError) as error:
            _, pause_s = self._barred.get(model, (0.0, _FIRST_PAUSE_S))
            self._barred[model] = time.monotonic() + pause_s, min(_LAST_PAUSE_S, 2 * pause_s)
            self._report(f"{error}; {model} is not tried again within {pause_s:g} s")
        finally:
            ready.cancel()
            del self._loaded[model]
            self._children.remove(child)
            self._changed()

    async def _until_ready(self, model: str, child: Child, started_s: float) -> None:
        await child.ready.wait()
        self._barred.pop(model, None)
        self._report(f"{child.spec.name} serves {model} ({time.monotonic() - started_s:.1f} s)")

    async def _unload(self, model: str) -> None:
        child = self._loaded[model]
        traffic = VersionTraffic(self._client(), model)
        try:
            await traffic.drain(child.spec.name, _DRAIN_WITHIN_S)
        except CliError as error:
            self._report(f"{child.spec.name} stays: {error}")
            await self._keep(traffic, child)
            return
        child.request_stop(_STOP_DEADLINE_S)
        await child.wait_ended()

    async def _keep(self, traffic: VersionTraffic, child: Child) -> None:
        """Have a worker take requests again, however often that has to be asked."""
        while child.pid is not None:
            try:
                await traffic.undrain(child.spec.name)
                return
            except CliError:
                await asyncio.sleep(_EVERY_S)

    def _note_trouble(self, trouble: str) -> None:
        """Once for each."""
        if trouble and trouble != self._trouble:
            self._report(trouble)
        self._trouble = trouble
