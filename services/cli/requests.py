"""How other commands speak to a running supervisor: a Unix socket in the state directory, one JSON object a line.

A command is `{"command": NAME, ...}`; the supervisor answers `{"line": ...}` any number of times, then `{"done": true}`
or `{"error": ...}`. Only the owner of the state directory (0700) reaches the socket (0600). A caller that hangs up
cancels what it asked for between two of its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from services.cli.errors import CliError, NotRunningError
from services.cli.state import StateDir

_MAX_LINE = 64 * 2**10
_READ_TIMEOUT_S = 5.0
# A command: what was asked, and where its progress goes. Raises CliError.
Command = Callable[[dict[str, Any], Callable[[str], None]], Awaitable[None]]


@asynccontextmanager
async def answering(state: StateDir, commands: dict[str, Command]) -> AsyncIterator[None]:
    """Serve commands by name for the time of the block."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(reader, writer, commands)
        finally:
            writer.close()

    with _short_path(state.socket) as path:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(serve, path, limit=_MAX_LINE)
        path.chmod(0o600)
    try:
        yield
    finally:
        server.close()
        state.socket.unlink(missing_ok=True)


def command(state: StateDir, asked: dict[str, Any], report: Callable[[str], None], timeout_s: float) -> None:
    """Have the running supervisor do something; report: takes its lines.

    Raises NotRunningError, or CliError with its refusal, or when it says nothing for `timeout_s` seconds.
    """
    if state.supervisor_pid() == 0:
        raise NotRunningError(f"no mesh is running on {state.root}")
    with socket.socket(socket.AF_UNIX) as connection, _short_path(state.socket) as path:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps(asked).encode() + b"\n")
            for line in connection.makefile():
                event = json.loads(line)
                if "done" in event:
                    return
                if "error" in event:
                    raise CliError(event["error"])
                report(event["line"])
        except OSError as error:
            raise CliError(f"the supervisor does not answer: {error}") from None
    raise CliError("the supervisor hung up")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: dict[str, Command]) -> None:
    def send(**event: object) -> None:
        writer.write(json.dumps(event).encode() + b"\n")

    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            asked = json.loads(await reader.readline())
        run = commands[asked["command"]]
    except (ValueError, KeyError, TypeError, TimeoutError):
        send(error="not a command")
        return
    work = asyncio.ensure_future(run(asked, lambda line: send(line=line)))
    hung_up = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({work, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            send(done=True)
    except CliError as error:
        send(error=str(error))
    finally:
        for task in (work, hung_up):
            task.cancel()
        await asyncio.gather(work, hung_up, return_exceptions=True)
    with contextlib.suppress(OSError):
        await writer.drain()


@contextmanager
def _short_path(path: Path) -> Iterator[Path]:
    """`path` by a name short enough for a socket's address, which state directories need not be."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
