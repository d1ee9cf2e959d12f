"""Real Envoy and Valkey replaced under their supervisor: streams, data, and a successor that cannot start."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.settings import Address, EnvoySettings
from services.cli.binaries import envoy_binary, valkey_binary
from services.cli.child import Child
from services.cli.errors import CliError
from services.cli.options import mesh_options
from services.cli.plan import Binaries, Planner, ProcessSpec
from services.cli.ports import free_ports
from services.cli.probes import valkey_reply
from services.cli.state import StateDir
from services.common.models import ModelSource
from tests.envoy.edge import serving_gateway
from tests.envoy.http_client import request

PASSWORD = "password-of-the-test"
START_LIMIT_S = 60.0
# Long enough for what a test does meanwhile, short enough to wait for.
PREDECESSOR_S = 12
CHAT = "/v1/chat/completions"


@dataclass
class Running:
    """The children of a mesh's plan by kind, where only Envoy and Valkey run."""

    state: StateDir
    children: dict[str, Child]

    async def valkey(self, command: str) -> str:
        async with asyncio.timeout(60):
            return await valkey_reply(self.children["valkey"].spec.address, PASSWORD, command)

    def pid(self, kind: str) -> int | None:
        return self.children[kind].pid


def shortened(spec: ProcessSpec) -> ProcessSpec:
    """With less time for an Envoy that has a successor."""
    flag = "--parent-shutdown-time-s"
    if flag not in spec.command:
        return spec
    where = spec.command.index(flag) + 1
    return dataclasses.replace(spec, command=(*spec.command[:where], str(PREDECESSOR_S), *spec.command[where + 1 :]))


@asynccontextmanager
async def running(folder: Path, gateway: str) -> AsyncIterator[Running]:
    state, ports = StateDir(folder), free_ports()
    state.create()
    plan = Planner(
        mesh_options(http_port=next(ports)),
        (ModelSource("m", Path("/m.gguf")),),
        state=state,
        binaries=Binaries(envoy_binary(), valkey_binary()),
        ports=ports,
        redis_password=PASSWORD,
        otlp_endpoint="",
    ).plan()
    for path, text in plan.files.items():
        state.write_private(path, text)
    children = {
        spec.kind: Child(
            shortened(spec),
            state,
            redis_password=PASSWORD,
            start_limit_s=START_LIMIT_S,
            report=print,
            changed=lambda: None,
        )
        for spec in plan.processes
        if spec.kind in ("envoy", "valkey")
    }
    envoy = children["envoy"].spec
    settings = EnvoySettings(
        listen=Address.parse(envoy.address), admin=Address.parse(envoy.admin), gateways=(Address.parse(gateway),)
    )
    state.write_private(state.run / "envoy.json", bootstrap_json(settings))
    runs = [asyncio.create_task(child.run()) for child in children.values()]
    try:
        async with asyncio.timeout(START_LIMIT_S):
            for child in children.values():
                await child.ready.wait()
        yield Running(state, children)
    finally:
        for child in children.values():
            child.request_stop(10)
        await asyncio.gather(*runs)
    base_id = children["envoy"].spec.base_id
    assert not list(Path("/dev/shm").glob(f"envoy_shared_memory_{base_id}*"))


async def test_a_stream_goes_on_while_envoy_is_replaced(tmp_path: Path) -> None:
    async with serving_gateway() as gateway, running(tmp_path, gateway.address) as mesh:
        port = Address.parse(mesh.children["envoy"].spec.address).port
        before = mesh.pid("envoy")
        async with request(port, "POST", CHAT, b'{"events": 1, "hold": true}') as stream:
            pieces = stream.pieces()
            assert (await anext(pieces))[1] == b"data: 0\n\n"
            await mesh.children["envoy"].replace(10, START_LIMIT_S)
            assert mesh.pid("envoy") not in (None, before)
            async with request(port, "POST", CHAT, b"{}") as response:
                assert response.status == 200
            # Waits for the first one to end: it would cut its streams.
            once_more = asyncio.create_task(mesh.children["envoy"].replace(10, START_LIMIT_S))
            gateway.openai.release.set()
            assert [piece async for piece in pieces] == []
        await once_more
        async with request(port, "POST", CHAT, b"{}") as response:
            assert response.status == 200


async def test_an_envoy_that_cannot_start_leaves_the_old_one_at_work(tmp_path: Path) -> None:
    async with serving_gateway() as gateway, running(tmp_path, gateway.address) as mesh:
        envoy, before = mesh.children["envoy"], mesh.pid("envoy")
        configuration = mesh.state.run / "envoy.json"
        good = configuration.read_text()
        configuration.write_text("{}}")
        with pytest.raises(CliError, match="does not take its configuration; the old one goes on"):
            await envoy.replace(10, START_LIMIT_S)
        assert mesh.pid("envoy") == before
        async with request(Address.parse(envoy.spec.address).port, "POST", CHAT, b"{}") as response:
            assert response.status == 200
        configuration.write_text(good)
        await envoy.replace(10, START_LIMIT_S)
        assert mesh.pid("envoy") not in (None, before)


async def test_valkey_leaves_its_data_to_its_successor_and_to_no_other(tmp_path: Path) -> None:
    async with serving_gateway() as gateway, running(tmp_path, gateway.address) as mesh:
        valkey = mesh.children["valkey"]
        before = mesh.pid("valkey")
        assert await mesh.valkey("SET kept 1") == "+OK"
        await valkey.replace(10, START_LIMIT_S)
        assert mesh.pid("valkey") not in (None, before)
        assert await mesh.valkey("EXISTS kept") == ":1"
        assert not mesh.state.dump.exists()
        before = mesh.pid("valkey")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not (mesh.pid("valkey") not in (None, before) and valkey.ready.is_set()):
                await asyncio.sleep(0.02)
        assert await mesh.valkey("EXISTS kept") == ":0"
