"""`kvmesh ctl adapter add | remove | list`: low-rank adapters of the mesh's models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvmesh.v1 import control_pb2 as pb

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, RouterOption, SecretOption, row, show_rows
from services.cli.commands.ctl_control import KeyOption, control
from services.cli.errors import CliError
from services.common.adapter_files import InvalidAdapter, read_adapter

adapter = typer.Typer(no_args_is_help=True, help="Low-rank adapters, which clients ask for as BASE:NAME.")
NameArgument = Annotated[str, typer.Argument(help="The adapter's name: letters, digits and ._-")]
ModelOption = Annotated[str, typer.Option("--model", help="Public name of its base model.")]


@adapter.command()
def add(
    name: NameArgument,
    path: Annotated[
        Path, typer.Argument(help="Folder that PEFT has saved, at the same place on every worker's machine.")
    ],
    model: ModelOption,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Read an adapter's folder here, and let clients ask for it; again with another content: for that one."""
    folder = path.expanduser().resolve()
    try:
        files = read_adapter(folder)
    except InvalidAdapter as error:
        raise CliError(f"{folder}: {error}") from None
    request = pb.AddAdapterRequest(name=name, model=model, path=str(folder), digest=files.digest.hex(), rank=files.rank)
    client = control(router, secret_file, key_file, state)
    show_rows([row(client.call(lambda stub, options: stub.AddAdapter(request, **options)))], as_json)


@adapter.command()
def remove(
    name: NameArgument,
    model: ModelOption,
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """No new requests for an adapter; running ones end as they would."""
    request = pb.RemoveAdapterRequest(name=name, model=model)
    client = control(router, secret_file, key_file, state)
    show_rows([row(client.call(lambda stub, options: stub.RemoveAdapter(request, **options)))], as_json)


@adapter.command("list")
def list_adapters(
    router: RouterOption = "",
    secret_file: SecretOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Registered adapters, and how many workers have each loaded."""
    client = control(router, secret_file, key_file, state)
    answer = client.call(lambda stub, options: stub.ListAdapters(pb.ListAdaptersRequest(), **options))
    show_rows([row(one) for one in answer.adapters], as_json)
