"""One streamed completion, event by event, over a connection of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any


async def completion_events(port: int, body: dict[str, Any]) -> AsyncIterator[str]:
    """The data of each event of a completion by the mesh at a local port, `[DONE]` included.

    Raises ConnectionError with the answer when it is refused; OSError.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\ncontent-type: application/json\r\n"
    try:
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        status = await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status:
            raise ConnectionError((status + await reader.read()).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()
    finally:
        writer.close()
