"""Where the events of one stream leave: keeps a silent stream open, and joins events when the process is behind.

A write costs more than everything else done for a token. While the event loop keeps up, every event leaves at once;
when it lags, a stream writes at most once in a pace that grows with the lag, so that a full core loses a little
smoothness instead of throughput. Never two writes of a stream at a time.
"""

from __future__ import annotations

import asyncio

import grpc.aio
import structlog
from google.api.httpbody_pb2 import HttpBody

from services.gateway.api.edge import Context
from services.gateway.api.openai_render import COMMENT, EVENT_STREAM
from services.gateway.pulse import Pulse

_log = structlog.get_logger("gateway.api")


class EventOutlet:
    """Owner of one stream's writes. Register with the pulse while it is open."""

    __slots__ = ("_beat", "_context", "_heartbeat_s", "_last_s", "_loop", "_pending", "_pulse", "_writing")

    def __init__(self, context: Context, pulse: Pulse, *, heartbeat_s: float) -> None:
        self._context = context
        self._pulse = pulse
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._pending = b""
        self._writing = False
        self._beat: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        """Send, or keep for the next write when the process is behind."""
        if self._loop.time() - self._last_s < self._pulse.pace_s:
            self._pending += data
        else:
            await self.flush(data)

    async def flush(self, data: bytes = b"") -> None:
        """Send everything kept, then `data`."""
        if self._beat is not None:
            await self._beat
        data = self._pending + data
        self._pending = b""
        if data:
            await self._write(data)

    def pulse(self, now_s: float) -> None:
        """Begin to send what has been kept for long enough, or a comment when the stream has been silent."""
        if self._writing or self._beat is not None:
            return
        silent_s = now_s - self._last_s
        if (self._pending and silent_s >= self._pulse.pace_s) or silent_s >= self._heartbeat_s:
            data, self._pending = self._pending or COMMENT, b""
            self._beat = asyncio.create_task(self._send_beat(data))

    async def _send_beat(self, data: bytes) -> None:
        try:
            await self._write(data)
        except grpc.aio.BaseError:
            # The client has left. The end of its call closes everything, and any further write fails by itself.
            _log.debug("beat_unsent")
        finally:
            self._beat = None

    async def _write(self, data: bytes) -> None:
        self._writing = True
        try:
            await self._context.write(HttpBody(content_type=EVENT_STREAM, data=data))
        finally:
            self._writing = False
            self._last_s = self._loop.time()
