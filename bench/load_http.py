"""Streamed completions over HTTP/1.1 with kept connections and as little work for each event as possible.

Two cores are shared with the mesh, so nothing is parsed while tokens arrive: the times of the first and the latest
event are noted and only the last event (usage) is decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from bench.load import Timing

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_READ_BYTES = 65_536
_CLOSE_TIMEOUT_S = 5.0
_REFUSAL_TIMEOUT_S = 1.0


class RequestFailedError(Exception):
    """The server refused or broke off; the message shows its answer, head its status line and headers."""

    def __init__(self, message: str, head: str = "") -> None:
        super().__init__(message)
        self.head = head

    @property
    def status(self) -> int:
        """Of HTTP; 0 where there was none."""
        words = self.head.split(maxsplit=2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case."""
        lines = (line.partition(":") for line in self.head.splitlines()[1:])
        return next((value.strip() for key, _, value in lines if key.strip().lower() == name), None)


class HttpLoad:
    """Sends requests to one base URL; connections are pooled.

    encode: prompts as the server takes them; None: token ids. extra: more fields of the body, or others.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str,
        *,
        encode: Callable[[Sequence[int]], str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"--url={url}: not an http:// URL")
        self._host, self._port = parts.hostname, parts.port or 80
        self._model = model
        self._encode = encode
        self._extra = dict(extra or {})
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n{authorization}"
            "content-type: application/json\r\ncontent-length: "
        ).encode()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Timing:
        """One request of exactly `output_tokens` output tokens. Raises RequestFailedError."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": self._encode(prompt) if self._encode else prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
        ).encode()
        reader, writer = await self._connection()
        start = time.perf_counter()
        try:
            writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
            timing = await _read_stream(reader, start, output_tokens)
        except BaseException:
            writer.close()
            raise
        self._idle.append((reader, writer))
        return timing

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A kept connection that the server has not closed meanwhile, or a new one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port)

    async def close(self) -> None:
        """Close idle connections."""
        for _, writer in self._idle:
            writer.close()
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await asyncio.gather(*(writer.wait_closed() for _, writer in self._idle), return_exceptions=True)


async def _read_stream(reader: asyncio.StreamReader, start: float, output_tokens: int) -> Timing:
    received = bytearray()
    first_s = last_s = 0.0
    while not received.endswith(_LAST_CHUNK):
        data = await reader.read(_READ_BYTES)
        now = time.perf_counter() - start
        received += data
        if not data or (not first_s and not received.startswith(b"HTTP/1.1 200")):
            message = await _refusal(reader, received)
            raise RequestFailedError(message or "the server closed the connection", _head(received))
        if _EVENT in data:
            first_s = first_s or now
            last_s = now
    usage = _usage(bytes(received), output_tokens)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Timing(first_s, last_s, usage["completion_tokens"], cached, usage.get("prompt_tokens", 0))


async def _refusal(reader: asyncio.StreamReader, received: bytearray) -> str:
    """Status and JSON body of a refusal, on one line; what has not come in time is left out."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
            while not received.rstrip().endswith((b"}", _LAST_CHUNK.strip())):
                if not (more := await reader.read(_READ_BYTES)):
                    break
                received += more
    head, _, body = received.removesuffix(_LAST_CHUNK).decode(errors="replace").partition("\r\n\r\n")
    return " ".join(f"{head.partition(chr(13))[0]} {body[max(0, body.find('{')) :]}".split())[:500]


def _head(received: bytearray) -> str:
    return received.decode(errors="replace").partition("\r\n\r\n")[0]


def _usage(received: bytes, output_tokens: int) -> dict[str, Any]:
    """Usage of the last event; a server that has none says by "length" that all tokens came. Else it has failed."""
    if _DONE not in received:
        raise RequestFailedError(received.decode(errors="replace")[-500:])
    start = received.rindex(_EVENT) + len(_EVENT) - 1
    event: dict[str, Any] = json.JSONDecoder().raw_decode(received[start:].decode())[0]
    usage: dict[str, Any] | None = event.get("usage")
    if usage is not None:
        return usage
    if [choice.get("finish_reason") for choice in event.get("choices", [])] != ["length"]:
        raise RequestFailedError(f"neither usage nor all tokens: {json.dumps(event)[:500]}")
    return {"completion_tokens": output_tokens}


@asynccontextmanager
async def http_load(
    url: str,
    model: str,
    api_key: str = "",
    *,
    encode: Callable[[Sequence[int]], str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> AsyncIterator[HttpLoad]:
    """A load that closes its connections."""
    load = HttpLoad(url, model, api_key, encode=encode, extra=extra)
    try:
        yield load
    finally:
        await load.close()
