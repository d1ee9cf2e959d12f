"""What `kvmesh ctl usage` says against what clients were told, over the loss of workers and of a gateway."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from services.cli.errors import CliError
from services.common.bearer_keys import hash_key
from tests.support.ctl import ctl
from tests.support.mesh import MODEL, Mesh, total
from tests.support.sim_mesh import running_sim_mesh
from tests.support.waiting import eventually, eventually_async

PATIENCE_S = 200
TENANTS = ("acme", "globex")
PRICES = """
[default]
request = 0.001
prompt_million = 2.0
cached_million = 0.5
output_million = 8.0
"""
TOLD = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


def client_of(mesh: Mesh, tenant: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=f"key-{tenant}", max_retries=0, timeout=300)


async def ask(
    client: openai.AsyncOpenAI, tenant: str, number: int, told: Counter[tuple[str, str]], **given: Any
) -> None:
    """One streamed answer to its end; its usage is added to what was told."""
    words = " ".join(f"word{(number % 5 * 7919 + i) % 997}" for i in range(60))
    stream = await client.completions.create(
        model=MODEL, prompt=words, max_tokens=60, stream=True, stream_options={"include_usage": True}, **given
    )
    async for chunk in stream:
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            told[tenant, "requests"] += 1
            told[tenant, "prompt_tokens"] += chunk.usage.prompt_tokens
            told[tenant, "cached_tokens"] += details.cached_tokens if details is not None else 0
            told[tenant, "output_tokens"] += chunk.usage.completion_tokens


async def counted(mesh: Mesh) -> Counter[tuple[str, str]]:
    rows = await ctl(mesh, "usage")
    sums: Counter[tuple[str, str]] = Counter()
    for row in rows:
        assert row["model"] == MODEL
        for name in ("requests", "prompt_tokens", "output_tokens"):
            sums[row["tenant"], name] += row[name]
        cached = sum(row[f"cached_{tier}_tokens"] for tier in ("local", "peer", "ram", "ssd"))
        sums[row["tenant"], "cached_tokens"] += cached
        computed = row["prompt_tokens"] - cached
        # In billionths, so that nothing is rounded here.
        cost = 1_000_000 * row["requests"] + 2000 * computed + 500 * cached + 8000 * row["output_tokens"]
        assert round(row["cost"] * 10**9) == cost
        assert row["accelerator_s"] > 0
    return sums


async def is_counted(mesh: Mesh, told: Counter[tuple[str, str]]) -> bool:
    try:
        return await counted(mesh) == told
    except CliError:
        # Redis may be slow, or only just back.
        return False


async def test_usage_adds_up_to_what_clients_were_told_over_a_kill_and_restarts(tmp_path: Path) -> None:
    keys, prices = tmp_path / "keys", tmp_path / "prices.toml"
    keys.write_text("".join(f"{hash_key(f'key-{tenant}')} {tenant}\n" for tenant in TENANTS))
    prices.write_text(PRICES)
    env = {"KVMESH_GATEWAY_KEYS_FILE": str(keys), "KVMESH_GATEWAY_PRICES_FILE": str(prices)}
    told: Counter[tuple[str, str]] = Counter()
    with running_sim_mesh("--workers", "2", env=env) as mesh:
        clients = {tenant: client_of(mesh, tenant) for tenant in TENANTS}
        asks = [
            asyncio.create_task(ask(clients[tenant], tenant, number, told))
            for number in range(10)
            for tenant in TENANTS
        ]
        await eventually(lambda: told["acme", "requests"] or told["globex", "requests"], timeout_s=PATIENCE_S)
        mesh.kill("worker-1", signal.SIGKILL)
        await asyncio.gather(*asks)
        assert told["acme", "requests"] == told["globex", "requests"] == 10
        # A repeat under the same key is told the same and costs nothing more.
        key = {"extra_headers": {"Idempotency-Key": "once"}}
        await ask(clients["acme"], "acme", 99, told, **key)
        before = told.copy()
        await ask(clients["acme"], "acme", 99, told, **key)
        assert told["acme", "output_tokens"] > before["acme", "output_tokens"]
        told = before
        await eventually_async(lambda: is_counted(mesh, told), PATIENCE_S, 0.2)
        # The gateway has told Redis of all that has ended: its death loses none of it.
        await eventually_async(lambda: _has_told(mesh))
        assert (
            total(mesh.metrics("gateway-0"), "kvmesh_gateway_output_tokens_total", tenant="acme")
            == told["acme", "output_tokens"]
        )
        mesh.replace("gateway-0")
        await eventually_async(lambda: _is_ready(clients["acme"]))
        await ask(clients["globex"], "globex", 7, told)
        await eventually_async(lambda: is_counted(mesh, told), PATIENCE_S, 0.2)
        # A Valkey that comes back empty is told again by the gateway's own file.
        mesh.replace("valkey")
        await ask(clients["acme"], "acme", 8, told)
        await eventually_async(lambda: is_counted(mesh, told), PATIENCE_S, 0.2)
        for client in clients.values():
            await client.close()


async def _has_told(mesh: Mesh) -> bool:
    return total(await asyncio.to_thread(mesh.metrics, "gateway-0"), "kvmesh_gateway_untold_requests") == 0


async def _is_ready(client: openai.AsyncOpenAI) -> bool:
    try:
        return bool((await client.models.list()).data)
    except openai.APIError:
        return False
