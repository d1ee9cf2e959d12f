"""Which batches this gateway runs: those that are not over and that no other gateway has, a few at a time.

Whoever has a batch's lease runs it. A gateway that dies lets its leases lapse; one that drains gives them back. Nothing
but the lease is in Redis, so one that restarts empty costs a batch no more than a change of gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.common.redis_client import RedisClient
from services.gateway.api.edge import as_gateway_error
from services.gateway.batches.batch_run import BatchRun, RunParts
from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.disk import Disk
from services.gateway.batches.layout import tenant_of
from services.gateway.batches.lease import RENEW_S, BatchLease
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.result_log import Superseded
from services.gateway.core import Core
from services.gateway.errors import GatewayError

# Between looks for batches without a gateway, and for what has expired.
_LOOK_S = 1.0
_SWEEP_S = 60.0
# A batch whose run has failed is left alone for so long here.
_AGAIN_S = 5.0
_log = structlog.get_logger("gateway.batches")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """max_running: batches at a time. max_lines: of all of them, in flight. max_requests: lines of one."""

    max_running: int
    max_lines: int
    max_requests: int


@dataclass(slots=True, eq=False)
class _Running:
    """A batch that this gateway has."""

    tenant: str
    task: asyncio.Task[None]
    run: BatchRun | None = None


@dataclass(slots=True)
class _State:
    open_batches: int = 0
    running: dict[str, _Running] = field(default_factory=dict)
    not_before_s: dict[str, float] = field(default_factory=dict)


class BatchRunner:
    """Owner of the runs of this gateway. `run` until cancelled, or until `stop` and then for ever without effect."""

    def __init__(
        self,
        core: Core,
        store: BatchStore,
        disk: Disk,
        client: RedisClient,
        instance: str,
        limits: RunnerLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: Unix time."""
        self._store = store
        self._disk = disk
        self._clock = clock
        self._max_running = limits.max_running
        # A gateway that is started again under its name is another holder.
        self._lease = BatchLease(client, f"{instance}:{secrets.token_hex(8)}")
        self._state = _State()
        self._wake = asyncio.Event()
        self._is_stopped = False
        self._swept_at_s = float("-inf")
        self._sweeping: asyncio.Task[None] | None = None
        self._metrics = BatchMetrics(
            lambda: self._state.open_batches, lambda: len(self._state.running), lambda: self.num_lines
        )
        self._parts = RunParts(
            core=core,
            store=store,
            disk=disk,
            metrics=self._metrics,
            clock=clock,
            max_requests=limits.max_requests,
            max_lines=limits.max_lines,
            lines=asyncio.Semaphore(limits.max_lines),
        )

    @property
    def num_lines(self) -> int:
        """Lines in flight; 0 when idle."""
        return sum(one.run.num_running for one in self._state.running.values() if one.run is not None)

    def wake(self) -> None:
        """There may be something to run."""
        self._wake.set()

    async def run(self) -> None:
        """Look for batches, and after the directory, until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._look()
            except Exception as error:
                # Without its runner a gateway ends, and all of them look at the same files.
                as_gateway_error(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    async def stop(self) -> None:
        """Leave every batch to others, and take up none. Idempotent."""
        self._is_stopped = True
        tasks = [one.task for one in self._state.running.values()]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        if self._is_stopped:
            return
        found = await self._disk.run(self._store.open_batches)
        self._state.open_batches = len(found)
        self._state.not_before_s = {key: at_s for key, at_s in self._state.not_before_s.items() if key in found}
        now_s = time.monotonic()
        most = max_of_a_tenant(self._max_running, len(set(found.values())))
        for batch_id, tenant in found.items():
            if len(self._state.running) >= self._max_running:
                break
            if sum(one.tenant == tenant for one in self._state.running.values()) >= most:
                continue
            is_due = now_s >= self._state.not_before_s.get(batch_id, now_s)
            if batch_id not in self._state.running and is_due and await self._lease.hold(batch_id):
                if self._is_stopped:
                    await self._lease.give_back(batch_id)
                    return
                self._start(batch_id, tenant)
        if not self._is_stopped:
            self._begin_sweep(now_s)

    def _begin_sweep(self, now_s: float) -> None:
        """Where one is due, beside the looks: a batch without a gateway does not wait for folders of all tenants."""
        is_sweeping = self._sweeping is not None and not self._sweeping.done()
        if not is_sweeping and now_s - self._swept_at_s >= _SWEEP_S:
            self._swept_at_s = now_s
            self._sweeping = asyncio.create_task(self._sweep_all())

    async def _sweep_all(self) -> None:
        try:
            await self._disk.run_long(self._sweep)
        except Exception as error:
            as_gateway_error(error)

    def _start(self, batch_id: str, tenant: str) -> None:
        self._state.not_before_s.pop(batch_id, None)
        task = asyncio.create_task(self._have(batch_id, tenant))
        self._state.running[batch_id] = _Running(tenant, task)
        task.add_done_callback(lambda _: self._state.running.pop(batch_id, None))

    async def _have(self, batch_id: str, tenant: str) -> None:
        """Run a batch for as long as its lease is ours."""
        work = asyncio.create_task(self._run(batch_id, tenant))
        reason = ""
        try:
            while not (await asyncio.wait({work}, timeout=RENEW_S))[0]:
                # Without an answer nobody else can have it either.
                if await self._lease.hold(batch_id) is False:
                    reason = "lease"
                    break
            else:
                work.result()
        except Superseded:
            reason = "superseded"
        except GatewayError as error:
            reason = type(error).__name__
        except asyncio.CancelledError:
            reason = "stopped"
            raise
        except Exception as error:
            # Says where it came from, and nothing of what was in it.
            reason = type(as_gateway_error(error)).__name__
        finally:
            work.cancel()
            await asyncio.wait({work})
            if reason:
                self._metrics.lost(reason)
                _log.warning("batch_left", batch_id=batch_id, tenant=tenant, reason=reason)
                self._state.not_before_s[batch_id] = time.monotonic() + _AGAIN_S
            await self._lease.give_back(batch_id)

    async def _run(self, batch_id: str, tenant: str) -> None:
        state = await self._disk.run(self._store.get, tenant, batch_id)
        if state.final is not None:
            await self._disk.run(self._store.close, state.record)
            return
        run = BatchRun(self._parts, state.record)
        self._state.running[batch_id].run = run
        await run.run()

    def _sweep(self) -> None:
        """Remove what has expired, of all tenants. Raises OSError once those have been swept that can be."""
        now_s = self._clock()
        failure: OSError | None = None
        for folder in self._store.files.layout.tenants.iterdir():
            tenant = tenant_of(folder)
            try:
                expired = self._store.files.sweep(tenant, now_s)
                self._store.sweep(tenant, now_s, self._store.files.limits.life_s)
            except OSError as error:
                _log.error("sweep_failed", tenant=tenant, error=type(error).__name__, errno=error.errno)
                failure = error
                continue
            if expired:
                _log.info("files_expired", tenant=tenant, files=expired)
        if failure is not None:
            raise failure


def max_of_a_tenant(max_running: int, num_tenants: int) -> int:
    """Batches of one tenant that run here at a time, so that there is a place for one more tenant.

    A batch may run for a day; it takes as many lines at a time as there may be, however few run beside it.
    """
    return max(1, max_running // (num_tenants + 1))
