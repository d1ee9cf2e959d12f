"""Clients that go away free what their requests held."""

from __future__ import annotations

import asyncio
import json

from tests.support.mesh import MODEL, Mesh, total, wait_for

ABORTS = 200
CONCURRENT = 20


async def abort_one(mesh: Mesh, number: int) -> None:
    """Open a stream, read some of it (or nothing) and cut the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    prompt = f"Request {number}. " + "Tell me everything about the sea. " * (number % 8)
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": 1000, "stream": True, "ignore_eos": True, "n": 1 + number % 2}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: mesh\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    if number % 3:
        async with asyncio.timeout(60):
            await reader.readuntil(b"data: ")
    writer.transport.abort()


async def test_aborted_streams_release_everything(mesh: Mesh) -> None:
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(number: int) -> None:
        async with gate:
            await abort_one(mesh, number)

    async with asyncio.timeout(300):
        await asyncio.gather(*(one(number) for number in range(ABORTS)))

    def idle() -> bool:
        workers = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("worker")]
        gateways = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("gateway")]
        held = sum(
            total(samples, f"kvmesh_worker_{what}")
            for samples in workers
            for what in ("running_requests", "waiting_requests", "referenced_blocks")
        )
        return held + sum(total(samples, "kvmesh_gateway_inflight_requests") for samples in gateways) == 0

    wait_for(idle, within_s=60, what="zero running, waiting and referenced after 200 aborted streams")
