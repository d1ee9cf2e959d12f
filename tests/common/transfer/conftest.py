"""Holder processes and a client, for each transport."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.common.security import MeshSecret
from services.common.transfer.grpc_client import GrpcTransport
from services.common.transfer.protocol import PeerAddress, Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_regions import Region, create_region
from services.common.transfer.ucx_client import UcxTransport
from services.common.transfer.ucx_reactor import UcxReactor
from tests.common.transfer.blocks import SECRET

_ROOT = Path(__file__).parents[3]


class HolderProcess:
    """One holder; ended by `end` whatever its state. within: a command that runs it, say in another network."""

    def __init__(self, transport: str, *options: str, within: Sequence[str] = ()) -> None:
        command = [*within, sys.executable, "-m", "tests.common.transfer.holder", "--transport", transport, *options]
        self.process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.peer = PeerAddress(**self._line())
        except ValueError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def state(self, order: str = "") -> dict[str, Any]:
        """Have the holder obey an order, and say what it says of itself."""
        assert self.process.stdin is not None
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()
        return self._line()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line


StartHolder = Callable[..., HolderProcess]


@pytest.fixture(params=["shm", "ucx", "grpc"])
def transport_name(request: pytest.FixtureRequest) -> str:
    """Every test of the contract runs over each."""
    return str(request.param)


@pytest.fixture
def start_holder(transport_name: str) -> Iterator[StartHolder]:
    """Starts holders that end with the test."""
    started: list[HolderProcess] = []

    def start(*options: str) -> HolderProcess:
        started.append(HolderProcess(transport_name, *options))
        return started[-1]

    yield start
    for holder in started:
        holder.end()


@pytest_asyncio.fixture
async def transport(transport_name: str) -> AsyncIterator[Transport]:
    """A client in this process."""
    async with open_transport(transport_name, MeshSecret(SECRET)) as client:
        yield client


@contextlib.asynccontextmanager
async def open_transport(name: str, secret: MeshSecret) -> AsyncIterator[Transport]:
    """A client in this process; what it pushes over shared memory lies in `shown_memory`."""
    if name == "ucx":
        reactor = UcxReactor()
        client: Transport = UcxTransport(reactor, secret.pull_key)
        yield client
        await client.close()
        reactor.close()
        return
    client = GrpcTransport(secret) if name == "grpc" else ShmTransport(secret.pull_key, [shown_memory()])
    yield client
    await client.close()


@functools.cache
def shown_memory() -> Region:
    """Memory of this process that peers may read."""
    region = create_region("kvmesh-test", 64 * 2**20)
    assert region is not None
    return region


def shown(blocks: Sequence[bytes]) -> list[memoryview]:
    """Blocks, put into `shown_memory`."""
    memory, offset, views = shown_memory().view, 0, []
    for block in blocks:
        views.append(memory[offset : offset + len(block)])
        views[-1][:] = block
        offset += len(block)
    return views
