"""The loader of models through what fails around it: it goes on, and tries what failed more and more seldom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kvmesh.v1 import control_pb2 as pb

from services.cli import model_loader
from services.cli.child import Child
from services.cli.control_client import ControlClient
from services.cli.model_loader import ModelLoader
from services.cli.plan import ProcessSpec
from services.cli.state import StateDir
from tests.support.waiting import eventually

SPEC = ProcessSpec("worker-1", "worker", ("worker",), "127.0.0.1:1")
WANTED = pb.PoolView(model="m", role="both", waiting_requests=1, desired_replicas=1)


class Routers(ControlClient):
    """One router, for whose model a request waits."""

    def __init__(self) -> None:
        super().__init__(["r"], None, "")  # type: ignore[arg-type]

    async def all_of(self, work: Any) -> Any:
        return {"r": pb.ListPoolsResponse(pools=[WANTED])}, {}


class Unstartable(Child):
    """There is no room for its process."""

    async def run(self) -> None:
        raise OSError("no room for a process")


async def test_it_goes_on_and_pauses_where_processes_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "_EVERY_S", 0.001)
    rounds, said, started, children = [0], list[str](), list[Child](), list[Child]()

    def client() -> ControlClient:
        rounds[0] += 1
        if rounds[0] <= 2:
            raise FileNotFoundError("no admin key")
        return Routers()

    def new_child(spec: ProcessSpec) -> Child:
        child = Unstartable(
            spec, StateDir(tmp_path), redis_password="", start_limit_s=1.0, report=said.append, changed=lambda: None
        )
        started.append(child)
        return child

    loader = ModelLoader(
        {"m": SPEC},
        max_loaded=1,
        client=client,
        new_child=new_child,
        children=children,
        paused=lambda: False,
        changed=lambda: None,
        report=said.append,
    )
    task = asyncio.create_task(loader.run())
    await eventually(lambda: rounds[0] > 20)
    assert said == [
        "no admin key",
        "requests wait for m; starting worker-1",
        "no room for a process; m is not tried again within 2 s",
    ]
    assert len(started) == 1
    assert children == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await loader.ended()
