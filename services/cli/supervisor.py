"""Starts every process of a mesh, keeps them alive, and stops them in order.

Ready means that every process says so and that `/readyz` answers 200 through Envoy. Whatever ends the start or the
supervisor, no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from services.cli.canary_start import canary_rollout
from services.cli.child import Child
from services.cli.control_client import ControlClient
from services.cli.errors import CliError, StartError
from services.cli.load_progress import load_progress
from services.cli.logs import rotate
from services.cli.model_loader import ModelLoader
from services.cli.plan import STOP_ORDER, MeshPlan, ProcessSpec
from services.cli.probes import PROBE_TIMEOUT_S, http_exchange, http_status
from services.cli.requests import answering
from services.cli.rollout import Rollout
from services.cli.state import StateDir
from services.common.security import MeshSecret

STOP_DEADLINE_S = 10.0
# After a start that failed: nobody is being served.
UNSERVED_STOP_DEADLINE_S = 2.0
_DRAIN_DEADLINE_S = 10.0
_ROTATE_INTERVAL_S = 5.0
_POLL_S = 0.1
_PROGRESS_INTERVAL_S = 3.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One mesh. `report` takes lines for a person; `start_timeout_s` bounds the start."""

    def __init__(
        self,
        plan: MeshPlan,
        state: StateDir,
        *,
        redis_password: str,
        start_timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._state = state
        self._start_timeout_s = start_timeout_s
        self._report = report
        self._phase = "starting"
        self._served = False
        self._rolling = asyncio.Lock()
        self._runs: set[asyncio.Task[None]] = set()
        self._redis_password = redis_password
        self._children = list(map(self._child, plan.processes))
        self._loader = ModelLoader(
            plan.on_demand,
            max_loaded=plan.max_loaded,
            client=self._control,
            new_child=self._child,
            children=self._children,
            paused=self._rolling.locked,
            changed=self._publish,
            report=report,
        )

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Until SIGTERM, SIGINT or SIGHUP. Raises StartError after stopping what had started."""
        background = [asyncio.create_task(self._rotate_logs())]
        with _stop_signals() as stop:
            try:
                await self._until_stopped(stop, self._start(self._start_timeout_s))
                if not stop.is_set():
                    self._served = True
                    self._set_phase("ready")
                    if self._plan.on_demand:
                        background.append(asyncio.create_task(self._loader.run()))
                    async with answering(self._state, {"rollout": self._roll_out}):
                        on_ready()
                        await self._until_stopped(stop, _forever())
            finally:
                self._set_phase("stopping")
                for task in background:
                    task.cancel()
                await self._stop(stop)
                await self._loader.ended()

    def _child(self, spec: ProcessSpec) -> Child:
        return Child(
            spec,
            self._state,
            redis_password=self._redis_password,
            start_limit_s=self._start_timeout_s,
            report=self._report,
            changed=self._publish,
        )

    def _control(self) -> ControlClient:
        secret = MeshSecret(self._state.secret_file.read_text().strip())
        routers = [child.spec.address for child in self._children if child.spec.kind == "router"]
        return ControlClient(routers, secret, self._state.admin_key_file.read_text().strip())

    async def _roll_out(self, asked: dict[str, Any], report: Callable[[str], None]) -> None:
        """Raises CliError."""
        if self._rolling.locked():
            raise CliError("a rollout is under way")

        def tell(line: str) -> None:
            self._report(line)
            report(line)

        async with self._rolling:
            if "canary" in asked:
                await canary_rollout(
                    asked["canary"],
                    children=self._children,
                    new_child=self._child,
                    state=self._state,
                    start_limit_s=self._start_timeout_s,
                    changed=self._publish,
                    report=tell,
                ).run()
                return
            rollout = Rollout(self._children, start_limit_s=self._start_timeout_s, report=tell)
            await rollout.run(interrupt=asked.get("interrupt") is True)
            tell("the rollout is complete")

    async def _start(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                for stage in (STOP_ORDER[-1:], STOP_ORDER[:-1]):
                    children = [child for child in self._children if child.spec.kind in stage]
                    self._runs |= {asyncio.create_task(child.run()) for child in children}
                    await asyncio.gather(*(self._wait_ready(child) for child in children))
                await self._wait_served()
        except TimeoutError:
            waiting = [child.spec.name for child in self._children if not child.ready.is_set()]
            raise StartError(f"not ready within {timeout_s:g} s: {', '.join(waiting) or '/readyz'}") from None

    async def _wait_ready(self, child: Child) -> None:
        start, told = time.monotonic(), ""
        while not child.ready.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_INTERVAL_S):
                    await child.ready.wait()
            progress = await load_progress(child.spec.metrics) if child.spec.kind == "worker" else ""
            if progress not in ("", told) and not child.ready.is_set():
                told = progress
                self._report(f"{child.spec.name}: {progress}")
        self._report(f"{child.spec.name} is ready on {child.spec.address} ({time.monotonic() - start:.1f} s)")

    async def _wait_served(self) -> None:
        address = reachable(self._plan.http_address)
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    if await http_status(address, "/readyz") == 200:
                        return
            await asyncio.sleep(_POLL_S)

    async def _until_stopped(self, stop: asyncio.Event, work: Coroutine[None, None, None]) -> None:
        """Wait for `work`, a stop signal or a child that cannot start, whichever is first."""
        ends = {asyncio.create_task(work), asyncio.create_task(stop.wait())}
        try:
            while not (done := {task for task in (*ends, *self._runs) if task.done()}):
                # The work adds runs, hence the timeout.
                await asyncio.wait(ends | self._runs, return_when=asyncio.FIRST_COMPLETED, timeout=_POLL_S)
            for task in done:
                task.result()
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _stop(self, stop: asyncio.Event) -> None:
        """In order, each kind with its deadline; a second signal ends everything at once."""
        stop.clear()
        hurry = asyncio.create_task(self._kill_at(stop))
        try:
            for kind in STOP_ORDER:
                children = [child for child in self._children if child.spec.kind == kind]
                if kind == "envoy":
                    await self._drain(hurry, [child.spec for child in children if child.ready.is_set()])
                await self._stop_kind(children)
        finally:
            hurry.cancel()
            await asyncio.gather(*self._runs, return_exceptions=True)

    async def _stop_kind(self, children: list[Child]) -> None:
        running = [child for child in children if child.pid is not None]
        start = time.monotonic()
        for child in children:
            child.request_stop(STOP_DEADLINE_S if self._served else UNSERVED_STOP_DEADLINE_S)
        await asyncio.gather(*(child.wait_ended() for child in children))
        if running:
            names = ", ".join(child.spec.name for child in running)
            self._report(f"{names} stopped ({time.monotonic() - start:.1f} s)")

    async def _drain(self, hurry: asyncio.Task[None], envoys: list[ProcessSpec]) -> None:
        for envoy in envoys:
            drain = asyncio.create_task(_drained(envoy))
            await asyncio.wait({hurry, drain}, return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()

    async def _kill_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for child in self._children:
            child.kill()

    async def _rotate_logs(self) -> None:
        while True:
            for name in ("supervisor", *(child.spec.name for child in self._children)):
                rotate(self._state.log(name))
            await asyncio.sleep(_ROTATE_INTERVAL_S)

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._publish()

    def _publish(self) -> None:
        processes = [
            {
                "name": child.spec.name,
                "kind": child.spec.kind,
                "pid": child.pid,
                "address": child.spec.address,
                "metrics": child.spec.metrics,
                "admin": child.spec.admin,
                "restarts": child.restarts,
                "silences": child.silences,
            }
            for child in self._children
        ]
        self._state.publish({"phase": self._phase, "http": self._plan.http_address, "processes": processes})


def reachable(address: str) -> str:
    """`address` as a client on this host names it: a wildcard becomes loopback."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else address


async def _forever() -> None:
    await asyncio.Event().wait()


async def _drained(envoy: ProcessSpec) -> None:
    """No new connections; wait for requests in flight."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(_DRAIN_DEADLINE_S):
            await http_exchange(envoy.admin, "/drain_listeners", "POST")
            while await _active_requests(envoy) > 0:
                await asyncio.sleep(_POLL_S)


async def _active_requests(envoy: ProcessSpec) -> int:
    _, body = await http_exchange(envoy.admin, "/stats?filter=^http.public.downstream_rq_active$")
    return int(body.rpartition(": ")[2].split()[0])


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
