"""A plain HTTP/1.1 client that shows each piece of a body as it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Response:
    """Status and headers are there; `pieces` yields the body's chunks with their arrival times."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def pieces(self) -> AsyncIterator[tuple[float, bytes]]:
        """(time, bytes) of the body."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readline(), 16):
                data = await self.reader.readexactly(size + 2)
                yield time.monotonic(), data[:-2]
            return
        yield time.monotonic(), await self.reader.readexactly(int(self.headers.get("content-length", 0)))

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([data async for _, data in self.pieces()])

    async def error(self) -> dict[str, Any]:
        """The OpenAI error of the body; fails unless it has that shape."""
        document = json.loads(await self.body())
        assert set(document) == {"error"}, document
        assert set(document["error"]) == {"message", "type", "param", "code"}, document
        assert isinstance(document["error"]["message"], str)
        assert document["error"]["message"]
        return document["error"]  # type: ignore[no-any-return]


@asynccontextmanager
async def request(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send one request on a connection of its own; leaving the context closes the connection."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            lines = [f"{method} {path} HTTP/1.1", "host: mesh"]
            if body:
                lines += ["content-type: application/json", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            yield await read_head(reader, writer)
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Response:
    """Read status line and headers."""
    status = int((await reader.readline()).split()[1])
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).decode().strip()) != "":
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return Response(status, headers, reader, writer)
