"""Commands that become another program: the services, the load generator and the simulator."""

from __future__ import annotations

import os
import sys

import typer

from services.cli.commands.arguments import api_url

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def gateway(context: typer.Context) -> None:
    """Run one gateway; `--help` lists its flags."""
    _become("services.gateway", context.args)


def router(context: typer.Context) -> None:
    """Run one router; `--help` lists its flags."""
    _become("services.router", context.args)


def kvstore(context: typer.Context) -> None:
    """Run one kvstore node; `--help` lists its flags."""
    _become("services.kvstore", context.args)


def worker(context: typer.Context) -> None:
    """Run one worker; `--help` lists its flags."""
    _become("services.worker", context.args)


def rank_host(context: typer.Context) -> None:
    """Offer this host to workers on others (`--rank-hosts`); `--help` lists its flags."""
    _become("services.worker.rank_host", context.args)


def bench(context: typer.Context) -> None:
    """Measure a running mesh: TTFT, TPOT and tokens/s; `--help` lists the flags."""
    arguments = context.args
    if not {"--url", "--direct", "--help"} & {argument.partition("=")[0] for argument in arguments}:
        arguments = ["--url", api_url("", None), *arguments]
    _become("bench.serving", arguments)


def simulate(context: typer.Context) -> None:
    """Run a trace through a simulated cluster, or find how many workers it needs; `--help` lists the flags."""
    _become("services.router.simulator", context.args)


def _become(module: str, arguments: list[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
