"""The engine and the mover as child processes: sockets, shared pool, start and end.

Both inherit their descriptors and die with this process. The pool is an anonymous memory file that the engine sizes
when it knows the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from services.common.settings import ServiceSettings
from services.worker.errors import ChildDied
from services.worker.ipc import AsyncLink
from services.worker.messages import Message

_END_TIMEOUT_S = 5.0


class PartLink(Protocol):
    """The front's end of a link: AsyncLink, or what stands in for one."""

    def send(self, message: Message) -> None:
        """Queue a message."""

    async def receive(self) -> Any:
        """The next message. Raises ConnectionError when the peer is gone."""

    async def receive_all(self) -> list[Any]:
        """Every message that has arrived, at least one. Raises ConnectionError when the peer is gone."""


class Part(Protocol):
    """An engine or a mover as the front sees it: a child process, or what runs in the front's own."""

    @property
    def role(self) -> str:
        """What it is."""

    @property
    def link(self) -> PartLink:
        """The link to it."""

    @property
    def pid(self) -> int | None:
        """Its process; None where it has none of its own."""

    async def watch(self) -> NoReturn:
        """Wait for its end. Raises ChildDied."""

    async def end(self) -> None:
        """Have it end. Idempotent."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running child and the link to it."""

    role: str
    process: Process
    link: AsyncLink  # type: ignore[type-arg]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def watch(self) -> NoReturn:
        """Wait for its end, which is always an error."""
        status = await self.process.wait()
        raise ChildDied(f"the {self.role} ended with status {status}")

    async def end(self) -> None:
        """Close the link, on which it ends by itself; killed when it does not. Idempotent."""
        await self.link.close()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def kill(part: Part) -> None:
    """End a part that no longer listens, perhaps since it is stopped; nothing where it has no process of its own."""
    if part.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGKILL)


class SharedParts:
    """Pool and engine-mover socket, made before the children and inherited by them."""

    def __init__(self) -> None:
        self.pool_fd = os.memfd_create("kvmesh-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.engine_end, self.mover_end = socket.socketpair()

    def close(self) -> None:
        """Let go of this process's copies."""
        self.engine_end.close()
        self.mover_end.close()
        with contextlib.suppress(OSError):
            os.close(self.pool_fd)


async def start_child(
    role: str,
    module: str,
    config: bytes,
    *,
    front_end: socket.socket,
    child_end: socket.socket,
    fds: Sequence[int],
    receives: object,
    environment: Mapping[str, str],
) -> Child:
    """Run `python -m module --config JSON` with the descriptors of `fds` and its end of the link to the front."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "--config",
        config.decode(),
        pass_fds=(*fds, child_end.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    child_end.close()
    return Child(role, process, await AsyncLink.open(front_end, receives))


def secret_environment(settings: ServiceSettings) -> dict[str, str]:
    """How a child learns the mesh secret: never from its command line, which is public."""
    given = settings.mesh_secret.get_secret_value()
    if given:
        return {"KVMESH_MESH_SECRET": given}
    return {"KVMESH_MESH_SECRET_FILE": str(settings.mesh_secret_file)}
