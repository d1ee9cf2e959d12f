"""`kvmesh ctl usage`: what tenants have used."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from kvmesh.v1 import control_pb2 as pb

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, RouterOption, SecretOption, row, show_rows
from services.cli.commands.ctl_control import KeyOption, control
from services.cli.errors import CliError
from services.common.usage import ACCELERATOR_UNIT, COST_UNIT

_NAMES = ("day", "tenant", "model")


def usage(
    tenant: Annotated[str, typer.Option(help="Of this tenant alone.")] = "",
    model: Annotated[str, typer.Option(help="Of this model alone.")] = "",
    since: Annotated[str, typer.Option(help="First day in UTC, as 2026-01-31, or how many days back, as 30d.")] = "",
    until: Annotated[str, typer.Option(help="Last day, written like that; default: today.")] = "",
    by: Annotated[str, typer.Option(help="What sums are shown for: day, tenant, model, with commas.")] = "tenant,model",
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Requests, tokens, accelerator time and cost of tenants and models, today or since a day."""
    names = [name.strip() for name in by.split(",") if name.strip()]
    if unknown := set(names) - set(_NAMES):
        raise CliError(f"--by={by!r}: {', '.join(sorted(unknown))} is none of {', '.join(_NAMES)}")
    request = pb.GetUsageRequest(tenant=tenant, model=model, first_day=_day(since), last_day=_day(until))
    client = control(router, secret_file, key_file, state)
    answer = client.call(lambda stub, options: stub.GetUsage(request, **options))
    show_rows(_sums(answer.rows, names), as_json)


def _day(given: str) -> str:
    """An ISO date of `30d` too; others go as they are."""
    if given.endswith("d") and given[:-1].isdecimal() and len(given) <= 4:
        return (datetime.now(UTC).date() - timedelta(int(given[:-1]))).isoformat()
    return given


def _sums(rows: Sequence[pb.UsageRow], names: list[str]) -> list[dict[str, object]]:
    sums: dict[tuple[str, ...], dict[str, int]] = {}
    for one in rows:
        figures = {name: int(str(value)) for name, value in row(one).items() if name not in _NAMES}
        sum_of = sums.setdefault(tuple(getattr(one, name) for name in names), dict.fromkeys(figures, 0))
        for name, value in figures.items():
            sum_of[name] += value
    return [{**dict(zip(names, key, strict=True)), **_shown(figures)} for key, figures in sorted(sums.items())]


def _shown(figures: dict[str, int]) -> dict[str, object]:
    """With time in seconds and money in its currency."""
    whole = dict(figures)
    accelerator_s, cost = whole.pop("accelerator_us") / ACCELERATOR_UNIT, whole.pop("cost_nano") / COST_UNIT
    return {**whole, "accelerator_s": round(accelerator_s, 6), "cost": round(cost, 9)}
