"""Sends this router's news to the others and takes theirs in, through one short stream in Redis.

News is worth something for moments only: it tells of load that workers' reports do not show yet. So it is batched for
a few milliseconds, the stream is kept short, what could not be sent is dropped, and after Redis was away reading begins
anew at the end. Routers that hear nothing of each other decide by the workers' reports and by what they granted
themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import msgspec
import structlog
from opentelemetry import metrics

from services.common.keys import KeySpace
from services.common.redis_client import BLOCK_MS, COMMAND_TIMEOUT_S, REDIS_ERRORS, Backoff, RedisClient, RedisHealth
from services.common.stream_entries import entries_of
from services.router.news.messages import Bulletin, News
from services.router.news.outbox import NewsOutbox

BATCH_S = 0.004
_STREAM_ENTRIES = 1_000
_READ_ENTRIES = 256
_FIELD = b"b"
_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.router.news")
_sent = _meter.create_counter("kvmesh_router_news_sent", description="News for other routers, by outcome.")
_received = _meter.create_counter("kvmesh_router_news_received", description="News of other routers, by outcome.")

# Takes one piece of another router's news in, at a monotonic time.
Apply = Callable[[News, float], None]


class NewsExchange:
    """Runs until cancelled."""

    def __init__(
        self,
        client: RedisClient,
        router: str,
        outbox: NewsOutbox,
        apply: Apply,
        *,
        health: RedisHealth,
        keyspace: KeySpace | None = None,
    ) -> None:
        """router: this router's own name, whose news is not taken in."""
        self._client = client
        self._router = router
        self._outbox = outbox
        self._apply = apply
        self._health = health
        self._key = (keyspace or KeySpace()).news
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Bulletin)

    async def run(self) -> None:
        """Send and receive."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            group.create_task(self._receive())

    async def _send(self) -> None:
        backoff = Backoff()
        while True:
            await self._outbox.filled.wait()
            await asyncio.sleep(BATCH_S)
            news = self._outbox.take()
            packed = self._encoder.encode(Bulletin(self._router, news))
            try:
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._client.xadd(self._key, {_FIELD: packed}, maxlen=_STREAM_ENTRIES, approximate=True)
                _sent.add(len(news), {"outcome": "sent"})
                backoff.reset()
            except REDIS_ERRORS as error:
                self._health.lost(error)
                _sent.add(len(news), {"outcome": "lost"})
                await asyncio.sleep(backoff.next_s())

    async def _receive(self) -> None:
        backoff = Backoff()
        while True:
            try:
                position = await self._end()
                while True:
                    position = await self._read(position)
                    self._health.answered()
                    backoff.reset()
            except REDIS_ERRORS as error:
                self._health.lost(error)
                await asyncio.sleep(backoff.next_s())

    async def _end(self) -> bytes:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            last = await self._client.xrevrange(self._key, count=1)
        return cast("bytes", last[0][0]) if last else b"0-0"

    async def _read(self, position: bytes) -> bytes:
        """What has come after `position`; the new position."""
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            reply = await self._client.xread({self._key: position}, count=_READ_ENTRIES, block=BLOCK_MS)
        for entry, fields in entries_of(reply):
            position = entry
            self._take_in(fields.get(_FIELD, b""))
        return position

    def _take_in(self, packed: bytes) -> None:
        try:
            bulletin = self._decoder.decode(packed)
        except msgspec.DecodeError as error:
            # A router of another version: its load shows in the workers' reports.
            _received.add(1, {"outcome": "not_understood"})
            _log.debug("news not understood", detail=str(error))
            return
        if bulletin.router == self._router:
            return
        now_s = time.monotonic()
        for news in bulletin.news:
            self._apply(news, now_s)
        _received.add(len(bulletin.news), {"outcome": "taken"})
