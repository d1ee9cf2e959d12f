"""Rolls a new version of a model out: one canary beside the workers, probes, a share of the traffic, then all workers.

The version in service gets all the traffic by weight before the canary starts, so that no client meets what is not
probed. Whatever fails, an interruption included, gives that version all traffic back, removes the canary and puts
replaced workers back; labels and weights are then as they were. What routers have in Redis is weights alone: where the
supervisor dies in the middle, its processes die with it, and a version without workers gets no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from kvmesh.v1 import control_pb2 as pb

from services.cli.canary_analysis import Analysis
from services.cli.canary_options import CanaryOptions
from services.cli.canary_plan import CANARY, CanaryPlan
from services.cli.canary_worker import STOP_DEADLINE_S, CanaryWorker
from services.cli.child import Child
from services.cli.errors import CliError
from services.cli.plan import ProcessSpec
from services.cli.probe_client import ProbeClient, probing
from services.cli.version_traffic import VersionTraffic
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError

_ALL = 100
# Requests of a worker that is to be replaced may take so long to end; the canary's when it is rolled back.
_DRAIN_WITHIN_S = 300.0
_LEAVE_WITHIN_S = 30.0


class CanaryRollout:
    """One rollout; `run` once."""

    def __init__(
        self,
        options: CanaryOptions,
        plan: CanaryPlan,
        *,
        worker: CanaryWorker,
        children: Sequence[Child],
        traffic: VersionTraffic,
        secret: MeshSecret,
        start_limit_s: float,
        report: Callable[[str], None],
    ) -> None:
        """children: of the supervisor, without the canary; report: takes lines for a person."""
        by_name = {child.spec.name: child for child in children}
        self._options = options
        self._plan = plan
        self._worker = worker
        self._workers = [by_name[name] for name in plan.workers]
        self._routers = [child.spec.metrics for child in children if child.spec.kind == "router"]
        self._traffic = traffic
        self._secret = secret
        self._start_limit_s = start_limit_s
        self._report = report
        # Weights and labels by digest before the rollout, and the digests of both versions once they are known.
        self._before: tuple[dict[str, int], dict[str, str]] | None = None
        self._stable = ""
        self._canary = ""
        # Workers that were drained, with their specs before.
        self._left: list[tuple[Child, ProcessSpec]] = []

    async def run(self) -> None:
        """Raises CliError with the reason once everything is as it was."""
        try:
            await self._settle()
            await self._worker.start(self._start_limit_s)
            async with AsyncExitStack() as stack:
                await self._analyse(await self._analysis(stack))
            await self._promote()
        except BaseException as error:
            reason = f"rolled back: {_reason(error)}"
            self._report(f"version {self._plan.label} is {reason}")
            await self._roll_back()
            if isinstance(error, Exception):
                raise CliError(reason) from error
            raise
        finishing = asyncio.ensure_future(self._finish())
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError:
            # There is nothing left to roll back.
            await finishing
            raise

    async def _settle(self) -> None:
        """All traffic to the one version that there is, on every router."""
        model = await self._traffic.now()
        served = [one for one in model.versions if (one.weight if model.weighted else one.replicas)]
        if len(served) != 1:
            raise CliError(f"{self._plan.name} has {len(served)} versions with traffic: settle on one before a rollout")
        self._before = _weights(model), {one.digest: one.version for one in model.versions if one.version}
        self._stable = served[0].digest
        if not served[0].version:
            await self._traffic.register(self._stable)
        await self._traffic.set_weights({self._stable: _ALL})

    async def _analysis(self, stack: AsyncExitStack) -> Analysis:
        canary = await stack.enter_async_context(probing(self._worker.address, self._secret))
        stable = await stack.enter_async_context(probing(self._workers[-1].spec.address, self._secret))
        self._check_identities(stable, canary)
        self._canary = canary.identity.model_digest.hex()
        await self._traffic.register(self._canary, self._plan.label)
        await self._traffic.until(_has_replicas(self._canary, 1), f"every router sees {CANARY}")
        self._report(f"{CANARY} is ready with version {self._plan.label} and no traffic")
        analysis = Analysis(
            self._options,
            stable=stable,
            canary=canary,
            routers=self._routers,
            check=self._worker.check,
            report=self._report,
        )
        await analysis.read_texts(self._plan.source)
        return analysis

    def _check_identities(self, stable: ProbeClient, canary: ProbeClient) -> None:
        if stable.identity.model_digest.hex() != self._stable:
            raise CliError(f"{stable.identity.worker_id} has not the version that gets the traffic")
        if canary.identity.model_digest == stable.identity.model_digest:
            raise CliError(f"version {self._plan.label} is what is served already")
        if canary.identity.tokenizer_digest != stable.identity.tokenizer_digest:
            raise CliError("the new model has another tokenizer: it needs a public name of its own")

    async def _analyse(self, analysis: Analysis) -> None:
        await analysis.probe()
        await analysis.begin_traffic()
        share = self._options.share
        await self._traffic.set_weights({self._stable: 100 - share, self._canary: share})
        self._report(f"version {self._plan.label} gets {share} % of the traffic")
        await analysis.watch_traffic()
        await analysis.probe()

    async def _promote(self) -> None:
        for number, child in enumerate(self._workers, 1):
            left = len(self._workers) - number
            await self._traffic.set_weights(_shares({self._stable: left, self._canary: number}))
            self._left.append((child, child.spec))
            await self._traffic.drain(child.spec.name, _DRAIN_WITHIN_S)
            child.spec = self._plan.successor(child.spec)
            took_s = await child.replace(STOP_DEADLINE_S, self._start_limit_s)
            await self._traffic.until(
                _has_replicas(self._canary, number + 1), f"every router sees the new {child.spec.name}"
            )
            self._report(f"{child.spec.name} has version {self._plan.label} ({took_s:.1f} s)")

    async def _finish(self) -> None:
        """The canary goes; the old version is forgotten, and weights are left only where there were any."""
        await self._try(self._leave())
        had_weights = self._before is not None and bool(self._before[0])
        await self._traffic.set_weights({self._canary: _ALL} if had_weights else {})
        await self._try(self._traffic.unregister(self._stable))
        self._report(f"the rollout is complete: {self._plan.name} has version {self._plan.label}")

    async def _roll_back(self) -> None:
        """Every step is tried, whatever becomes of those before it."""
        if self._before is None:
            return
        if self._canary and len(self._left) < len(self._workers):
            await self._try(self._traffic.set_weights({self._stable: _ALL}))
        for child, spec in reversed(self._left):
            await self._try(self._put_back(child, spec))
        await self._try(self._leave())
        await self._try(self._restore_entry(*self._before))

    async def _put_back(self, child: Child, spec: ProcessSpec) -> None:
        if child.spec is spec:
            await self._traffic.undrain(spec.name)
        else:
            child.spec = spec
            await child.replace(STOP_DEADLINE_S, self._start_limit_s)
            await self._traffic.until(_has_replicas(self._stable, 1), f"every router sees the old {spec.name}")
        await self._traffic.set_weights({self._stable: _ALL})

    async def _leave(self) -> None:
        """The canary drains, unless it has ended by itself, and stops."""
        try:
            if self._canary and self._worker.is_ready:
                await self._traffic.drain(CANARY, _LEAVE_WITHIN_S)
        finally:
            await self._worker.stop()

    async def _restore_entry(self, weights: dict[str, int], labels: dict[str, str]) -> None:
        """Labels and weights as they were; without weights only once nobody would send the canary anything."""
        if self._canary:
            await self._traffic.until(lambda model: not _replicas(model, self._canary), f"{CANARY} is gone")
        await self._traffic.set_weights(weights)
        known = {one.digest for one in (await self._traffic.now()).versions if one.version}
        for digest in known & {self._stable, self._canary} - labels.keys():
            await self._traffic.unregister(digest)

    async def _try(self, step: Awaitable[None]) -> None:
        try:
            await step
        except CliError as error:
            self._report(f"not done: {error}")


def _has_replicas(digest: str, count: int) -> Callable[[pb.ModelVersions], bool]:
    """Whether so many workers of a version take requests."""
    return lambda model: any(one.ready_replicas >= count for one in model.versions if one.digest == digest)


def _reason(error: BaseException) -> str:
    if isinstance(error, CliError | ConfigurationError):
        return str(error)
    return "interrupted" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"


def _weights(model: pb.ModelVersions) -> dict[str, int]:
    return {one.digest: one.weight for one in model.versions if one.weight}


def _shares(weights: dict[str, int]) -> dict[str, int]:
    return {digest: weight for digest, weight in weights.items() if weight}


def _replicas(model: pb.ModelVersions, digest: str) -> int:
    return sum(one.replicas for one in model.versions if one.digest == digest)
