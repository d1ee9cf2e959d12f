"""`kvmesh ctl kv clear`: puts a tenant's cached blocks out of reach everywhere, drops them and destroys their keys.

First a new generation begins, which gateways put into the ids and owners of blocks; then every gateway and node says
that it has carried it out. Whatever did not is named, and the exit status is 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.cli.commands.arguments import StateOption
from services.cli.commands.ctl import SecretOption, mesh_secret
from services.cli.commands.kv_nodes import (
    NodeOption,
    RedisOption,
    ask_nodes,
    node_addresses,
    redis_address,
    redis_client,
)
from services.cli.errors import CliError
from services.common.blocks import owner_digest, tenant_tag
from services.common.generation_table import GenerationTable, Outcome, TableFull
from services.common.redis_client import REDIS_ERRORS
from services.common.rpc import call_metadata
from services.common.security import MeshSecret

_NODE_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class _Report:
    outcome: Outcome
    cleared: dict[str, kvstore_pb2.ClearResponse]
    silent: dict[str, str]


def clear(
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")],
    node: NodeOption = None,
    redis_url: RedisOption = "",
    secret_file: SecretOption = None,
    timeout_s: Annotated[float, typer.Option(min=5.0, help="Longest wait for gateways and nodes.")] = 20.0,
    state: StateOption = None,
) -> None:
    """Put a tenant's cached blocks out of reach, drop them from every node and destroy their keys."""
    if not tenant:
        raise CliError("--tenant is empty: no tenant has that name")
    secret, url = mesh_secret(secret_file, state), redis_address(redis_url, state)
    if not url:
        raise CliError("--redis-url is needed where there is no local mesh")
    report = asyncio.run(_clear(tenant, node, url, secret, timeout_s, state))
    typer.echo("\n".join(_lines(tenant, report)))
    if report.outcome.missing or report.silent:
        raise typer.Exit(1)


async def _clear(
    tenant: str, node: list[str] | None, url: str, secret: MeshSecret, timeout_s: float, state: Path | None
) -> _Report:
    async with redis_client(url) as client:
        addresses = await node_addresses(node, client, state)
        try:
            outcome = await GenerationTable(client).clear(tenant_tag(secret.block_key, tenant), timeout_s=timeout_s)
        except TableFull as error:
            raise CliError(str(error)) from None
        except REDIS_ERRORS as error:
            raise CliError(f"redis does not answer, run it again: {type(error).__name__}") from None
    request = kvstore_pb2.ClearRequest(
        owner_digest=owner_digest(secret.block_key, tenant=tenant, cleared=outcome.generation)
    )

    async def ask(stub: kvstore_pb2_grpc.KvStoreAsyncStub) -> kvstore_pb2.ClearResponse:
        return await stub.Clear(request, timeout=_NODE_TIMEOUT_S, metadata=call_metadata(secret))

    cleared, silent = await ask_nodes(addresses, ask)
    return _Report(outcome, cleared, silent)


def _lines(tenant: str, report: _Report) -> list[str]:
    lines = [f"tenant {tenant}: generation {report.outcome.generation}"]
    lines += [f"{name}: carried out" for name in report.outcome.done]
    for address, answer in report.cleared.items():
        lines.append(
            f"node {address}: {answer.ram_blocks} blocks in RAM and {answer.ssd_blocks} on SSD dropped, "
            f"{answer.destroyed_keys} keys destroyed"
        )
    for name, follower in report.outcome.missing.items():
        effect = "may reach older blocks" if name.startswith("gateway/") else "may still have older blocks"
        lines.append(f"{name}: NOT carried out ({effect}); last heard of {follower.silent_s} s ago")
    for address, reason in report.silent.items():
        lines.append(f"node {address}: NO ANSWER ({reason}); it clears its SSD when it is back, before it serves")
    return lines
