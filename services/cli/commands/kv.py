"""`kvmesh ctl kv`: what the nodes of the KV tier hold, and clearing a tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, SecretOption, mesh_secret, show_rows
from services.cli.commands.kv_clear import clear
from services.cli.commands.kv_figures import flat_fields, table
from services.cli.commands.kv_nodes import (
    NodeOption,
    RedisOption,
    ask_nodes,
    node_addresses,
    redis_address,
    redis_client,
)
from services.cli.errors import CliError
from services.common.rpc import call_metadata
from services.common.security import MeshSecret

_TIMEOUT_S = 10.0

kv = typer.Typer(no_args_is_help=True, help="Ask the nodes of the KV tier.")
kv.command()(clear)


@kv.command()
def stats(
    node: NodeOption = None,
    redis_url: RedisOption = "",
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """What each node holds in RAM and on SSD, and its counts since start."""
    url = redis_address(redis_url, state)
    answers, silent = asyncio.run(_stats(node, url, mesh_secret(secret_file, state), state))
    if as_json:
        show_rows([flat_fields(answer) for answer in answers.values()], as_json)
    elif answers:
        show_rows(table(list(answers.values())), as_json)
    for address, reason in silent.items():
        typer.echo(f"node {address}: no answer ({reason})", err=True)
    if silent:
        raise typer.Exit(1)


async def _stats(
    node: list[str] | None, url: str, secret: MeshSecret, state: Path | None
) -> tuple[dict[str, kvstore_pb2.StatsResponse], dict[str, str]]:
    async def ask(stub: kvstore_pb2_grpc.KvStoreAsyncStub) -> kvstore_pb2.StatsResponse:
        return await stub.Stats(kvstore_pb2.StatsRequest(), timeout=_TIMEOUT_S, metadata=call_metadata(secret))

    if url:
        async with redis_client(url) as client:
            addresses = await node_addresses(node, client, state)
    else:
        addresses = await node_addresses(node, None, state)
    if not addresses:
        raise CliError("no node is known: --node, --redis-url or a local mesh is needed")
    return await ask_nodes(addresses, ask)
