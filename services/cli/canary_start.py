"""Makes a canary rollout of what a running supervisor has and what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.cli.canary import CanaryRollout
from services.cli.canary_options import canary_options
from services.cli.canary_plan import canary_plan
from services.cli.canary_worker import CanaryWorker
from services.cli.child import Child
from services.cli.control_client import ControlClient
from services.cli.errors import CliError
from services.cli.plan import LOOPBACK, ProcessSpec
from services.cli.ports import free_ports
from services.cli.state import StateDir
from services.cli.version_traffic import VersionTraffic
from services.common.security import MeshSecret
from services.common.settings import ConfigurationError


def canary_rollout(
    asked: dict[str, Any],
    *,
    children: list[Child],
    new_child: Callable[[ProcessSpec], Child],
    state: StateDir,
    start_limit_s: float,
    changed: Callable[[], None],
    report: Callable[[str], None],
) -> CanaryRollout:
    """asked: CanaryOptions. children: the supervisor's; the canary is among them while it lives. Raises CliError."""
    options = canary_options(asked)
    ports = free_ports()
    address, metrics = (f"{LOOPBACK}:{next(ports)}" for _ in range(2))
    specs = [child.spec for child in children]
    try:
        plan = canary_plan(options, specs, state, address=address, metrics=metrics)
    except ConfigurationError as error:
        raise CliError(str(error)) from None
    secret = MeshSecret(state.secret_file.read_text().strip())
    routers = [spec.address for spec in specs if spec.kind == "router"]
    client = ControlClient(routers, secret, state.admin_key_file.read_text().strip())
    return CanaryRollout(
        options,
        plan,
        worker=CanaryWorker(new_child(plan.canary), children, changed),
        children=children,
        traffic=VersionTraffic(client, plan.name),
        secret=secret,
        start_limit_s=start_limit_s,
        report=report,
    )
