"""SIGSTOP each kind of process and each child of a worker: killed, started again and ready; others are undisturbed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.test_kills import Stream, stream
from tests.support.mesh import Mesh, running_mesh, wait_for

# Silence of 5 s, looks of a second before it, the end of the parts, a start.
BACK_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = ("--workers", "2", "--routers", "2", "--kvstores", "1", "--threads", "1")
    with running_mesh(tmp_path_factory.mktemp("mesh"), *options) as running:
        yield running


def stop(mesh: Mesh, name: str, role: str = "") -> int:
    """SIGSTOP a process or its child of that role; the pid."""
    entry = mesh.process(name)
    pid: int = next(one["pid"] for one in entry["children"] if one["role"] == role) if role else entry["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


def back(mesh: Mesh, *stopped: int) -> None:
    """Wait until none of the stopped is there, and everything is ready again."""

    def healed() -> bool:
        entries = mesh.ps()
        pids = {entry["pid"] for entry in entries} | {c["pid"] for entry in entries for c in entry["children"]}
        return not pids & set(stopped) and all(entry["ready"] for entry in entries)

    wait_for(healed, within_s=BACK_WITHIN_S, what="stopped processes are replaced")


async def test_streams_elsewhere_do_not_notice(mesh: Mesh) -> None:
    """The engine of one worker, and what answers in the middle of a stream do not need."""
    seen = [Stream() for _ in range(8)]
    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(seen):
            group.create_task(stream(mesh, number, one))
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.started.wait() for one in seen))
        stopped = [
            stop(mesh, "worker-0", "engine"),
            *(stop(mesh, name) for name in ("router-0", "kvstore-0", "valkey")),
        ]
        await asyncio.to_thread(back, mesh, *stopped)
    assert all(one.done and not one.error for one in seen if one.worker != "worker-0"), seen
    silences = {entry["name"]: entry["silences"] for entry in mesh.ps()}
    assert all(silences[name] for name in ("router-0", "kvstore-0", "valkey"))
    assert silences["worker-0"] == 0, "a worker ends by itself when a child of its is silent"


def test_the_rest_comes_back(mesh: Mesh) -> None:
    stopped = stop(mesh, "worker-0", "mover"), *(stop(mesh, name) for name in ("worker-1", "gateway-0", "envoy"))
    back(mesh, *stopped)
