"""The `kvmesh` command."""

from __future__ import annotations

import sys

import typer

from deploy.envoy.settings import EnvoyConfigurationError
from services.cli.commands import service
from services.cli.commands.chat import chat
from services.cli.commands.ctl import ctl
from services.cli.commands.ctl_adapters import adapter
from services.cli.commands.ctl_control import COMMANDS as CONTROL_COMMANDS
from services.cli.commands.ctl_explain import explain
from services.cli.commands.ctl_models import COMMANDS as MODEL_COMMANDS
from services.cli.commands.ctl_usage import usage
from services.cli.commands.ctl_workers import load, memory, unload
from services.cli.commands.doctor import doctor
from services.cli.commands.kv import kv
from services.cli.commands.models import models
from services.cli.commands.ps import logs, ps
from services.cli.commands.rollout import rollout
from services.cli.commands.up import down, up
from services.cli.errors import CliError
from services.common.settings import ConfigurationError, exit_on_configuration_error

app = typer.Typer(
    name="kvmesh",
    help="A mesh of gRPC services that serves language models where their KV cache lives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(down)
app.command()(ps)
app.command()(logs)
app.command()(chat)
app.command()(doctor)
ctl.add_typer(kv, name="kv")
ctl.add_typer(adapter, name="adapter")
ctl.command()(memory)
ctl.command()(load)
ctl.command()(unload)
ctl.command()(explain)
ctl.command()(rollout)
ctl.command()(usage)
for name, operation in (CONTROL_COMMANDS | MODEL_COMMANDS).items():
    ctl.command(name)(operation)
app.add_typer(ctl, name="ctl")
app.add_typer(models, name="models")
for command in (
    service.bench,
    service.gateway,
    service.router,
    service.kvstore,
    service.worker,
    service.rank_host,
    service.simulate,
):
    app.command(context_settings=service.PASS_THROUGH)(command)


def main() -> None:
    """Entry point; what a person did wrong is one line and exit status 2."""
    try:
        app()
    except (CliError, ConfigurationError, EnvoyConfigurationError) as error:
        sys.exit(exit_on_configuration_error(ConfigurationError(str(error))))
