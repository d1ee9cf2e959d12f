"""Tokens per second that one core of a gateway carries: streams through a real gateway process between load sources.

    python -m bench.gateway --streams 256 --tokens 400

The gateway's own processor time (user and system, from the kernel) is what counts: tokens through it divided by that
time is its rate on one core, whatever the load sources and other programs on the machine use.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from google.api.httpbody_pb2 import HttpBody
from kvmesh.v1.openai_pb2_grpc import OpenAIStub

from bench.gateway_peer import SECRET
from services.common.rpc import open_channel

_START_TIMEOUT_S = 60.0
_STREAM_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A started gateway."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def started(step_s: float) -> AsyncIterator[Gateway]:
    """A gateway process and its peer process; both end with the block."""
    peer = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "bench.gateway_peer", str(step_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdout is not None
    assert peer.stdin is not None
    gateway = None
    try:
        router_address = (await asyncio.to_thread(peer.stdout.readline)).split()[0]
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder) / "ready.json"
            environment = {**os.environ, "KVMESH_MESH_SECRET": SECRET}
            command = [
                sys.executable,
                "-m",
                "services.gateway",
                "--routers",
                router_address,
                "--ready-file",
                str(ready),
            ]
            gateway = subprocess.Popen([*command, "--log-level", "ERROR"], env=environment)  # noqa: ASYNC220
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not ready.is_file():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield Gateway(json.loads(ready.read_text())["address"], gateway.pid)
    finally:
        if gateway is not None:
            gateway.terminate()
            gateway.wait(60)
        peer.stdin.close()
        peer.wait(60)


async def read_stream(stub: OpenAIStub, tokens: int) -> tuple[int, float]:
    """Events that carried text, and the time to the first of them."""
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Go on."}], "stream": True,
            "max_tokens": tokens, "ignore_eos": True}  # fmt: skip
    started_s, first_s, events = time.perf_counter(), 0.0, 0
    call = stub.ChatCompletions(HttpBody(data=json.dumps(body).encode()), timeout=_STREAM_TIMEOUT_S)
    async for message in call:  # type: ignore[attr-defined]
        if b'"content":"' in message.data and b'"role"' not in message.data:
            first_s = first_s or time.perf_counter() - started_s
            events += 1
    return events, first_s


async def load(gateway: Gateway, stub: OpenAIStub, streams: int, tokens: int) -> tuple[float, float, list[float], int]:
    """Processor seconds, wall seconds, times to the first token and events of `streams` streams at once."""
    cpu_s, wall_s = gateway.cpu_s(), time.perf_counter()
    results = await asyncio.gather(*(read_stream(stub, tokens) for _ in range(streams)))
    first_s = [first_s for _, first_s in results]
    events = sum(events for events, _ in results)
    return gateway.cpu_s() - cpu_s, time.perf_counter() - wall_s, first_s, events


async def measure(streams: int, tokens: int, step_s: float) -> None:
    """Run and print. The cost of a request's start is told apart by streams of one token."""
    async with started(step_s) as gateway:
        channel = open_channel(gateway.address)
        stub = OpenAIStub(channel)
        await load(gateway, stub, 8, 8)
        start_cpu_s, _, _, _ = await load(gateway, stub, streams, 1)
        cpu_s, wall_s, first_s, events = await load(gateway, stub, streams, tokens)
        await channel.close(None)
    total, further = streams * tokens, streams * (tokens - 1)
    print(
        f"streams={streams} tokens={total} events={events} wall={wall_s:.2f}s gateway_cpu={cpu_s:.2f}s "
        f"tokens/s={total / wall_s:,.0f} ttft_p50={1e3 * statistics.median(first_s):.1f}ms\n"
        f"tokens/s/core={total / cpu_s:,.0f}, of running streams {further / max(0.01, cpu_s - start_cpu_s):,.0f}; "
        f"cpu of a request's start {1e3 * start_cpu_s / streams:.2f}ms"
    )


def main(
    streams: Annotated[int, typer.Option(help="Streams at a time.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each stream.")] = 400,
    step_ms: Annotated[float, typer.Option(help="Time between tokens of a stream; 0: as fast as they go.")] = 25.0,
) -> None:
    """Measure a gateway's tokens per second and core."""
    asyncio.run(measure(streams, tokens, step_ms / 1e3))


if __name__ == "__main__":
    typer.run(main)
