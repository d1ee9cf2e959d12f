"""`kvmesh ctl`: what the router knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import grpc
import grpc.aio
import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from kvmesh.v1 import router_pb2, router_pb2_grpc

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.errors import CliError
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

_TIMEOUT_S = 3.0
RouterOption = Annotated[
    str, typer.Option("--router", help="Router addresses, with commas; default: those of the local mesh.")
]
SecretOption = Annotated[
    Path | None, typer.Option("--secret-file", help="File of the mesh secret; default: the local mesh's.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ctl = typer.Typer(no_args_is_help=True, help="Ask services what they know; operate models, traffic and workers.")


@ctl.command()
def workers(
    router: RouterOption = "", secret_file: SecretOption = None, as_json: JsonOption = False, state: StateOption = None
) -> None:
    """Workers and their load."""
    _show(_describe(router, secret_file, state).workers, as_json)


@ctl.command()
def kvstores(
    router: RouterOption = "", secret_file: SecretOption = None, as_json: JsonOption = False, state: StateOption = None
) -> None:
    """Nodes of the KV tier."""
    _show(_describe(router, secret_file, state).kvstores, as_json)


@ctl.command()
def index(
    router: RouterOption = "", secret_file: SecretOption = None, as_json: JsonOption = False, state: StateOption = None
) -> None:
    """Size of the location index and whether Redis is reached."""
    answer = _describe(router, secret_file, state)
    show_rows([{"indexed_blocks": answer.indexed_blocks, "redis_connected": answer.redis_connected}], as_json)


def _describe(router: str, secret_file: Path | None, state: Path | None) -> router_pb2.DescribeResponse:
    """The first router that answers."""
    addresses = router_addresses(router, state)
    secret = mesh_secret(secret_file, state)
    reason = ""
    for address in addresses:
        try:
            return asyncio.run(_ask(address, secret))
        except grpc.aio.AioRpcError as error:
            reason = f"router {address}: {error.code().name}: {error.details()}"
    raise CliError(reason or "the mesh has no router")


def mesh_secret(secret_file: Path | None, state: Path | None) -> MeshSecret:
    """The secret of the mesh that is asked. Raises CliError."""
    path = secret_file or state_dir(state).secret_file
    try:
        return MeshSecret(path.read_text().strip())
    except OSError as error:
        raise CliError(f"mesh secret {path}: {error.strerror}") from None


def router_addresses(router: str, state: Path | None) -> list[str]:
    """Those given, else those of the local mesh."""
    return [one.strip() for one in router.split(",") if one.strip()] or local_addresses("router", state)


def local_addresses(kind: str, state: Path | None) -> list[str]:
    """Addresses of the local mesh's processes of one kind."""
    processes = state_dir(state).snapshot()["processes"]
    return [str(one["address"]) for one in processes if one["kind"] == kind]


async def _ask(address: str, secret: MeshSecret) -> router_pb2.DescribeResponse:
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        return await stub.Describe(router_pb2.DescribeRequest(), timeout=_TIMEOUT_S, metadata=call_metadata(secret))


def _show(messages: Iterable[Message], as_json: bool) -> None:
    show_rows([row(message) for message in messages], as_json)


def row(message: Message) -> dict[str, object]:
    """Every field of a message."""
    return dict(
        json_format.MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def show_rows(rows: list[dict[str, object]], as_json: bool) -> None:
    """A table, or JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    typer.echo("\n".join(_table(rows)) if rows else "none")


def _table(rows: list[dict[str, object]]) -> list[str]:
    """Lines of a table with a column for every field; a terminal that is too narrow wraps it, nothing is cut.

    Fields that a row leaves out (those that the router does not know) show as "-".
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([str(row.get(name, "-")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
