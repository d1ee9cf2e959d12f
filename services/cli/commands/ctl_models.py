"""`kvmesh ctl alias | default-model | pools`: other names of models, and what autoscalers see of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer
from kvmesh.v1 import control_pb2 as pb
from kvmesh.v1.router_pb2 import ModelAlias

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, RouterOption, SecretOption, row, show_rows
from services.cli.commands.ctl_control import KeyOption, control
from services.cli.control_client import ControlClient
from services.cli.errors import CliError


def alias(
    name: Annotated[str, typer.Argument(help="The other name; none: show all.")] = "",
    model: Annotated[str, typer.Argument(help="Public name of the model that it stands for from now on.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="The name stands for nothing any more.")] = False,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Show aliases, or have one stand for a model, at once and for every gateway."""
    if bool(name) != (bool(model) or remove) or (model and remove):
        raise CliError("alias takes a name and a model, a name and --remove, or nothing")
    client = control(router, secret_file, key_file, state)
    aliases = _set(client, name, model) if name else _aliases(client)
    show_rows([{"alias": one.name, "model": one.model} for one in aliases if one.name], as_json)


def default_model(
    model: Annotated[str, typer.Argument(help="Public name of a model; none: show it.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Requests have to name a model.")] = False,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Show or set the model of requests that name none."""
    if model and clear:
        raise CliError("--clear takes no model")
    client = control(router, secret_file, key_file, state)
    aliases = _set(client, "", model) if model or clear else _aliases(client)
    show_rows([{"default_model": one.model} for one in aliases if not one.name], as_json)


def pools(
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Models and roles with their workers, the workers that the load asks for, and what waits."""
    client = control(router, secret_file, key_file, state)
    answer = client.call(lambda stub, options: stub.ListPools(pb.ListPoolsRequest(), **options))
    show_rows([{**row(pool), "idle_s": round(pool.idle_s, 1)} for pool in answer.pools], as_json)


def _aliases(client: ControlClient) -> Iterable[ModelAlias]:
    return client.call(lambda stub, options: stub.ListAliases(pb.ListAliasesRequest(), **options)).aliases


def _set(client: ControlClient, name: str, model: str) -> Iterable[ModelAlias]:
    request = pb.SetAliasRequest(name=name, model=model)
    return client.call(lambda stub, options: stub.SetAlias(request, **options)).aliases


COMMANDS: dict[str, Callable[..., None]] = {"alias": alias, "default-model": default_model, "pools": pools}
