"""SIGKILL or stop one part of the mesh under a load of eight streams: none notices, and new requests soon succeed.

Half of the streams are greedy, half sampled; each must say what it says undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest

from tests.support.mesh import MODEL, Mesh, running_mesh, total, wait_for

STREAMS = 8
# A worker without processor time is silent, and its streams are rescued: of so many drains one moves some.
DRAINS = 4
TOKENS = 100
# About a second on a quiet machine.
NEW_REQUEST_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = ("--workers", "2", "--routers", "2", "--kvstores", "1")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options) as running:
        yield running


@dataclass
class Stream:
    """What one streaming client saw."""

    worker: str = ""
    text: str = ""
    error: str = ""
    done: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)


async def events(mesh: Mesh, body: dict[str, object]) -> AsyncIterator[tuple[dict[str, str], str]]:
    """(response headers, event data) of one streamed completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    payload = json.dumps({"model": MODEL, "stream": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    try:
        status = await reader.readline()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        if b" 200 " not in status:
            raise ConnectionError((status + await reader.read()).decode())
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield headers, line[6:].decode().strip()
    finally:
        writer.close()


async def stream(mesh: Mesh, number: int, seen: Stream) -> None:
    body = {
        "prompt": f"Story number {number}:", "max_tokens": TOKENS, "ignore_eos": True,
        "temperature": float(number % 2), "seed": number,
    }  # fmt: skip
    async with asyncio.timeout(120):
        async for headers, data in events(mesh, body):
            seen.worker = headers["x-kvmesh-worker"]
            if data == "[DONE]":
                seen.done = True
            elif "error" in (event := json.loads(data)):
                seen.error = event["error"]["message"]
            else:
                seen.text += event["choices"][0]["text"]
                seen.started.set()


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh) -> list[str]:
    """What the streams say when nothing happens."""
    seen = [Stream() for _ in range(STREAMS)]

    async def run() -> None:
        await asyncio.gather(*(stream(mesh, number, one) for number, one in enumerate(seen)))

    mesh.wait_ready()
    asyncio.run(run())
    return [one.text for one in seen]


def assert_unnoticed(seen: list[Stream], undisturbed: list[str]) -> None:
    assert [one.error for one in seen] == [""] * STREAMS
    assert all(one.done for one in seen)
    assert [one.text for one in seen] == undisturbed


async def time_to_success(mesh: Mesh) -> float:
    """Seconds until a fresh request was answered, asking again as a client would."""
    start = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(NEW_REQUEST_WITHIN_S):
                async for _, data in events(mesh, {"prompt": f"Hello {start}", "max_tokens": 1}):
                    if data == "[DONE]":
                        return time.monotonic() - start
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            if time.monotonic() - start > 4 * NEW_REQUEST_WITHIN_S:
                raise
        await asyncio.sleep(0.02)


def worker_of(seen: list[Stream]) -> str:
    """The worker of the stream that has most to say yet: where they land is the router's affair."""
    running = [one for one in seen if not one.done]
    assert running, "all had ended before the last began"
    return min(running, key=lambda one: len(one.text)).worker


async def kill_under_load(mesh: Mesh, name: str) -> tuple[str, list[Stream], list[float]]:
    """Start the streams, kill `name`, or "" for a worker that has some, once all of them produce.

    Returns who was killed, what the streams saw, and how long new requests took.
    """
    seen = [Stream() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(seen):
            group.create_task(stream(mesh, number, one))
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.started.wait() for one in seen))
        victim = name or worker_of(seen)
        mesh.kill(victim)
        took = [await time_to_success(mesh) for _ in range(3)]
    return victim, seen, took


@pytest.mark.parametrize("kind", ["kvstore", "valkey", "router", "worker"])
async def test_kill(mesh: Mesh, kind: str, undisturbed: list[str]) -> None:
    mesh.wait_ready()
    names = [entry["name"] for entry in mesh.of_kind(kind)] if kind != "worker" else [""]
    for name in names:
        victim, seen, took = await kill_under_load(mesh, name)
        print(f"{victim}: new requests after {', '.join(f'{s * 1e3:.0f}' for s in took)} ms")
        assert_unnoticed(seen, undisturbed)
        assert max(took) < NEW_REQUEST_WITHIN_S
        wait_for(lambda: all(entry["ready"] for entry in mesh.ps()), within_s=60, what=f"{victim} is back")


@pytest.mark.parametrize("role", ["engine", "mover", "front"])
async def test_stop(mesh: Mesh, role: str, undisturbed: list[str]) -> None:
    """A process that is only stopped keeps its sockets open; its streams, and new requests, soon go elsewhere."""
    mesh.wait_ready()
    seen = [Stream() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(mesh, number, one)) for number, one in enumerate(seen)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.started.wait() for one in seen))
        worker = mesh.process(worker_of(seen))
        pid = worker["pid"] if role == "front" else next(c["pid"] for c in worker["children"] if c["role"] == role)
        os.kill(pid, signal.SIGSTOP)
        try:
            took = await asyncio.gather(*(time_to_success(mesh) for _ in range(4)))
            await asyncio.wait(streams)
        finally:
            # Unless the supervisor has put another in its place.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    print(f"{role} stopped: new requests after {', '.join(f'{s * 1e3:.0f}' for s in took)} ms")
    assert max(took) < NEW_REQUEST_WITHIN_S
    assert_unnoticed(seen, undisturbed)


async def test_drain(mesh: Mesh, undisturbed: list[str]) -> None:
    """A worker that is told to end has its running streams moved first."""
    gateway = mesh.of_kind("gateway")[0]["name"]
    for _ in range(DRAINS):
        mesh.wait_ready()
        before = mesh.metrics(gateway)
        await drain_under_streams(mesh, undisturbed)
        after = mesh.metrics(gateway)

        def gained(name: str, **labels: str) -> float:
            return total(after, name, **labels) - total(before, name, **labels)  # noqa: B023

        moved = gained("kvmesh_gateway_moves_total", outcome="moved")
        gaps_s, rescued = gained("kvmesh_gateway_move_gap_seconds_sum"), gained("kvmesh_gateway_rescues_total")
        print(f"{moved:.0f} streams moved, mean gap {1e3 * gaps_s / max(1.0, moved):.0f} ms, {rescued:.0f} rescued")
        if moved:
            return
    raise AssertionError(f"no stream was moved: {mesh.logs()[-4000:]}")


async def drain_under_streams(mesh: Mesh, undisturbed: list[str]) -> None:
    """SIGTERM to a worker with streams; it comes back."""
    seen = [Stream() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(seen):
            group.create_task(stream(mesh, number, one))
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.started.wait() for one in seen))
        victim = worker_of(seen)
        mesh.kill(victim, signal.SIGTERM)
    assert_unnoticed(seen, undisturbed)
    wait_for(lambda: all(entry["ready"] for entry in mesh.ps()), within_s=120, what=f"{victim} is back")
