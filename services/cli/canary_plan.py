"""What a canary rollout starts and changes, from the processes that run and what was asked. Reads no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.cli.canary_options import CanaryOptions, flag_of, new_label, with_flags
from services.cli.errors import CliError
from services.cli.plan import ProcessSpec
from services.cli.state import StateDir
from services.common.models import ModelSource, resolve_model

CANARY = "worker-canary"
# The last of a kind can serve whole requests as long as one of the stable version is wanted.
_ROLE_ORDER = ("prefill", "both", "decode", "")


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """name: the public one. source: the new artifact. label: of the new version. canary: the process beside the others.

    workers: names of those to be replaced, in this order.
    """

    name: str
    source: ModelSource
    label: str
    canary: ProcessSpec
    workers: tuple[str, ...]
    flags: dict[str, str]

    def successor(self, spec: ProcessSpec) -> ProcessSpec:
        """A worker with its name and addresses, and the new version."""
        return replace(spec, command=with_flags(spec.command, self.flags))


def canary_plan(
    options: CanaryOptions, specs: Sequence[ProcessSpec], state: StateDir, *, address: str, metrics: str
) -> CanaryPlan:
    """address, metrics: where the canary listens. Raises CliError, ConfigurationError for an absent model."""
    name, separator, _ = options.model.partition("=")
    by_name: dict[str, list[ProcessSpec]] = {}
    for spec in specs:
        if spec.kind == "worker":
            by_name.setdefault(_source_of(spec).name, []).append(spec)
    if not separator:
        if len(by_name) != 1:
            raise CliError(f"the mesh serves {', '.join(sorted(by_name))}: --model NAME=PATH says which is meant")
        (name,) = by_name
    if name not in by_name:
        raise CliError(f"--model={options.model!r}: no worker of this mesh serves {name!r}")
    workers = sorted(by_name[name], key=lambda spec: _ROLE_ORDER.index(flag_of(spec.command, "role")))
    source = resolve_model(options.model) if options.model else _source_of(workers[0])
    label = options.version or new_label()
    flags = {**options.flags, "model": f"{name}={source.path}", "revision": label}
    own = {
        "instance": CANARY,
        "listen": address,
        "metrics-listen": metrics,
        "ready-file": str(state.ready_file(CANARY)),
        # Versions share no blocks: it must serve whole requests by itself.
        "role": "both",
    }
    canary = replace(
        workers[0], name=CANARY, command=with_flags(workers[0].command, flags | own), address=address, metrics=metrics
    )
    return CanaryPlan(name, source, label, canary, tuple(spec.name for spec in workers), flags)


def _source_of(spec: ProcessSpec) -> ModelSource:
    return resolve_model(flag_of(spec.command, "model"))
