"""Asking the nodes of the KV tier, all at once, and the Redis that they are registered in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import grpc.aio
import typer
from google.protobuf.message import Message
from kvmesh.v1 import kvstore_pb2_grpc

from services.cli.commands.arguments import state_dir
from services.cli.commands.ctl import local_addresses
from services.cli.errors import CliError, NotRunningError
from services.common.redis_client import REDIS_ERRORS, RedisClient, connect_redis
from services.common.registry import read_registry
from services.common.rpc import open_channel

NodeOption = Annotated[
    list[str] | None,
    typer.Option("--node", help="Address of a node; repeat for more; default: all that Redis or the local mesh knows."),
]
RedisOption = Annotated[str, typer.Option("--redis-url", help="Redis of the mesh; default: the local mesh's.")]
Answer = TypeVar("Answer", bound=Message)
# In quotes: the asynchronous stub is a name of the type stubs only.
Ask: TypeAlias = "Callable[[kvstore_pb2_grpc.KvStoreAsyncStub], Awaitable[Answer]]"


async def ask_nodes(addresses: Iterable[str], ask: Ask[Answer]) -> tuple[dict[str, Answer], dict[str, str]]:
    """Answers by address, and for nodes without one the reason."""
    answers: dict[str, Answer] = {}
    reasons: dict[str, str] = {}

    async def ask_one(address: str) -> None:
        try:
            async with open_channel(address) as channel:
                answers[address] = await ask(kvstore_pb2_grpc.KvStoreStub(channel))
        except grpc.aio.AioRpcError as error:
            reasons[address] = f"{error.code().name}: {error.details()}"

    ordered = list(dict.fromkeys(addresses))
    await asyncio.gather(*(ask_one(address) for address in ordered))
    return {address: answers[address] for address in ordered if address in answers}, reasons


async def node_addresses(node: list[str] | None, client: RedisClient | None, state: Path | None) -> list[str]:
    """The nodes that are meant: those named, else those of the local mesh and those registered."""
    if node:
        return node
    try:
        local = local_addresses("kvstore", state)
    except NotRunningError:
        local = []
    registered = await _registered(client) if client is not None else []
    return list(dict.fromkeys([*local, *registered]))


def redis_address(redis_url: str, state: Path | None) -> str:
    """`--redis-url`, else the local mesh's, else empty."""
    try:
        return redis_url or state_dir(state).redis_url_file.read_text().strip()
    except OSError:
        return ""


@asynccontextmanager
async def redis_client(url: str) -> AsyncIterator[RedisClient]:
    """A client for the block."""
    client = connect_redis(url)
    try:
        yield client
    finally:
        await client.aclose()


async def _registered(client: RedisClient) -> list[str]:
    try:
        records = await read_registry(client)
    except REDIS_ERRORS:
        raise CliError("redis does not answer") from None
    return sorted(record.grpc_address for record in records if record.kind == "kvstore")
