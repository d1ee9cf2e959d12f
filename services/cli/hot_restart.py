"""Replaces an Envoy by another process that takes its listening sockets over (Envoy's hot restart).

The successor is told its epoch, finds its predecessor by the base id and a socket in their folder, and accepts once it
is ready. The predecessor goes on with the connections that it has and asks HTTP clients to come again with each
response, until its successor ends it after `PREDECESSOR_S`. Nobody else may end it earlier: the successor talks to it,
and gives up when it has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

from services.cli.errors import CliError
from services.cli.plan import PREDECESSOR_S, ProcessSpec
from services.cli.probes import PROBE_TIMEOUT_S, http_exchange

_POLL_S = 0.1
# What a predecessor may take to end, beyond its time.
_MARGIN_S = 30.0


class HotRestart:
    """Owner of the epoch of one Envoy, and of predecessors that are not gone yet."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._leaving: set[asyncio.Task[None]] = set()
        self.epoch = 0

    async def until_live(self, process: asyncio.subprocess.Process, epoch: int, within_s: float) -> None:
        """Wait until `process` accepts connections. Raises CliError."""
        ends_s = time.monotonic() + within_s
        while await self._generation() != epoch + 1:
            if process.returncode is not None:
                raise CliError(f"the new {self._spec.name} does not start; the old one goes on")
            if time.monotonic() > ends_s:
                raise CliError(f"the new {self._spec.name} is not ready within {within_s:g} s; the old one goes on")
            await asyncio.sleep(_POLL_S)

    async def check(self, within_s: float) -> None:
        """Have the program read its configuration. Raises CliError when it cannot.

        A successor that ends before it is ready leaves a mark, and no other could take over any more.
        """
        nowhere = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *(*self._spec.command, "--mode", "validate", "--disable-hot-restart"),
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            cwd=self._spec.folder,
        )
        try:
            async with asyncio.timeout(within_s):
                status = await process.wait()
        except TimeoutError:
            status = 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if status != 0:
            raise CliError(f"{self._spec.name} does not take its configuration; the old one goes on")

    async def alone(self) -> None:
        """Wait until no predecessor is left: a process that gets a successor ends its own predecessor at once."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    def see_off(self, process: asyncio.subprocess.Process) -> None:
        """Take note of a predecessor until it has ended."""
        task = asyncio.create_task(self._leave(process))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """End the predecessors that are left; the last successor has ended."""
        tasks = list(self._leaving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        """Envoy leaves it behind; its name is the base id and a digit for the first process."""
        Path(f"/dev/shm/envoy_shared_memory_{self._spec.base_id}0").unlink(missing_ok=True)

    async def _leave(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(PREDECESSOR_S + _MARGIN_S):
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _generation(self) -> int | None:
        """Epoch + 1 of the Envoy that has the admin page, which a successor takes over when it is ready."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, page = await http_exchange(self._spec.admin, "/stats?filter=^server.hot_restart_generation$")
            if found := re.search(r": (\d+)", page):
                return int(found[1])
        return None
