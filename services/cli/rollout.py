"""Replaces the processes of a running mesh one after another, so that none of its clients notices.

From the inside out: Valkey, kvstores, routers, workers, gateways, Envoy. Valkey leaves its data to its successor, and
the mesh does without it meanwhile. A service gets SIGTERM and drains: a worker's streams move or finish, a gateway's
finish, while Envoy takes its refusals elsewhere. Its successor has its name, ports and command, and the next one
follows once the rest of the mesh knows the successor. While one is away others of its kind serve, so there must be two
of each that requests need. Envoy's successor takes over from it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from services.cli.child import Child
from services.cli.errors import CliError
from services.cli.plan import DRAIN_DEADLINE_S, GATEWAY_DRAIN_DEADLINE_S
from services.cli.probes import PROBE_TIMEOUT_S, http_exchange

ORDER = ("valkey", "kvstore", "router", "worker", "gateway", "envoy")
# Without these no request is served.
_NEEDED = ("router", "worker", "gateway")
# Beyond a service's own drain deadline.
_STOP_MARGIN_S = 10.0
_KNOWN_WITHIN_S = 60.0
_POLL_S = 0.2


class Rollout:
    """Of the `children` of one supervisor; report: takes lines for a person."""

    def __init__(self, children: Sequence[Child], *, start_limit_s: float, report: Callable[[str], None]) -> None:
        self._children = children
        self._start_limit_s = start_limit_s
        self._report = report

    async def run(self, *, interrupt: bool) -> None:
        """Replace everything in ORDER; interrupt: also what is the only one of its kind.

        Raises CliError when the only one would have to go, and when a successor is not there in time: the rest then
        stays as it is. Cancelling lets a replacement that has begun go on by itself.
        """
        alone = [kind for kind in _NEEDED if len(self._of(kind)) == 1]
        if alone and not interrupt:
            raise CliError(f"there is only one {alone[0]}: requests would wait or fail meanwhile (--interrupt)")
        for kind in ORDER:
            for child in self._of(kind):
                await self._replace(child)

    async def _replace(self, child: Child) -> None:
        await _until(self._all_ready, _KNOWN_WITHIN_S, f"something is not ready before {child.spec.name} may go")
        drain_s = GATEWAY_DRAIN_DEADLINE_S if child.spec.kind == "gateway" else DRAIN_DEADLINE_S
        took_s = await child.replace(drain_s + _STOP_MARGIN_S, self._start_limit_s)
        await _until(self._is_known, _KNOWN_WITHIN_S, f"the mesh does not see all of its {child.spec.kind}s")
        self._report(f"{child.spec.name} is replaced ({took_s:.1f} s)")

    async def _all_ready(self) -> bool:
        return all(child.ready.is_set() for child in self._children)

    async def _is_known(self) -> bool:
        """All have Redis, routers have life signs of all workers, and Envoy's last check of every gateway was good."""
        for child in self._children:
            connected = _sample(await _page(child.spec.metrics, "/metrics"), "kvmesh_redis_connected")
            if connected is not None and connected < 1:
                return False
        workers, gateways = len(self._of("worker")), len(self._of("gateway"))
        for router in self._of("router"):
            page = await _page(router.spec.metrics, "/metrics")
            known, suspect = _sample(page, "kvmesh_router_workers"), _sample(page, "kvmesh_router_suspect_workers")
            if known is None or suspect is None or known - suspect < workers:
                return False
        for envoy in self._of("envoy"):
            page = await _page(envoy.spec.admin, "/stats?filter=^cluster.gateways.membership_healthy$")
            if f": {gateways}" not in page:
                return False
        return True

    def _of(self, kind: str) -> list[Child]:
        return [child for child in self._children if child.spec.kind == kind]


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float, otherwise: str) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not await condition():
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CliError(f"{otherwise}; the rollout ends here") from None


async def _page(address: str, path: str) -> str:
    """Empty when there is no answer."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return (await http_exchange(address, path))[1]
    except (OSError, TimeoutError, ValueError):
        return ""


def _sample(page: str, name: str) -> float | None:
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return None if found is None else float(found[1])
