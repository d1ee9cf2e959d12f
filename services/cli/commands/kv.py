"""`kvmesh ctl kv`: what the nodes of the KV tier hold, and dropping a tenant's blocks there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import grpc.aio
import typer
from google.protobuf.message import Message
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import JsonOption, SecretOption, local_addresses, mesh_secret, row, show_rows
from services.cli.errors import CliError
from services.common.blocks import owner_digest
from services.common.registry import new_epoch
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

_TIMEOUT_S = 10.0
NodeOption = Annotated[
    list[str] | None, typer.Option("--node", help="Address of a node; repeat for more; default: the local mesh's.")
]
_Answer = TypeVar("_Answer", bound=Message)
# In quotes: the asynchronous stub is a name of the type stubs only.
_Ask: TypeAlias = "Callable[[kvstore_pb2_grpc.KvStoreAsyncStub, MeshSecret], Awaitable[_Answer]]"

kv = typer.Typer(no_args_is_help=True, help="Ask the nodes of the KV tier.")


@kv.command()
def stats(
    node: NodeOption = None, secret_file: SecretOption = None, as_json: JsonOption = False, state: StateOption = None
) -> None:
    """What each node holds in RAM and on SSD, and its counts since start."""

    def ask(stub: kvstore_pb2_grpc.KvStoreAsyncStub, secret: MeshSecret) -> Awaitable[kvstore_pb2.StatsResponse]:
        return stub.Stats(kvstore_pb2.StatsRequest(), timeout=_TIMEOUT_S, metadata=call_metadata(secret))

    rows = [_flat(answer) for answer in _answers(ask, node, mesh_secret(secret_file, state), state)]
    if as_json:
        show_rows(rows, as_json)
        return
    # One column for each node: there are more figures than nodes.
    show_rows([{"": name, **{str(one["kvstore_id"]): one[name] for one in rows}} for name in (rows or [{}])[0]], False)


@kv.command()
def clear(
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")],
    node: NodeOption = None,
    secret_file: SecretOption = None,
    state: StateOption = None,
) -> None:
    """Drop a tenant's blocks from every node and destroy the key of those on SSD."""
    secret = mesh_secret(secret_file, state)
    request = kvstore_pb2.ClearRequest(owner_digest=owner_digest(secret.block_key, tenant=tenant, cleared=new_epoch()))

    def ask(stub: kvstore_pb2_grpc.KvStoreAsyncStub, secret: MeshSecret) -> Awaitable[kvstore_pb2.ClearResponse]:
        return stub.Clear(request, timeout=_TIMEOUT_S, metadata=call_metadata(secret))

    answers = _answers(ask, node, secret, state)
    typer.echo(f"{len(answers)} nodes cleared, {sum(answer.ram_blocks for answer in answers)} blocks in RAM dropped")


def _answers(ask: _Ask[_Answer], node: list[str] | None, secret: MeshSecret, state: Path | None) -> list[_Answer]:
    """Of every node; the first that does not answer is an error."""

    async def ask_one(address: str) -> _Answer:
        async with open_channel(address) as channel:
            return await ask(kvstore_pb2_grpc.KvStoreStub(channel), secret)

    answers = []
    for address in node or local_addresses("kvstore", state):
        try:
            answers.append(asyncio.run(ask_one(address)))
        except grpc.aio.AioRpcError as error:
            raise CliError(f"kvstore {address}: {error.code().name}: {error.details()}") from None
    return answers


def _flat(answer: kvstore_pb2.StatsResponse) -> dict[str, object]:
    """Figures of the SSD and of replication beside the others; a node without an SSD tier has none of the former."""
    fields = row(answer)
    for part in ("ssd", "replication"):
        fields.pop(part, None)
        if answer.HasField(part):
            fields.update({f"{part}_{name}": value for name, value in row(getattr(answer, part)).items()})
    return fields
