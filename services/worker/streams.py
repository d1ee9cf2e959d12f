"""The open requests of the front: what the engine says about each waits here until its stream takes it.

A queue is bounded; a reader that leaves it full loses its request, nobody else's. Exactly one terminal event ends a
stream: StaleRequest, RequestFailed or RequestUsage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.messages import (
    AdmittedRequest,
    ChoiceOutput,
    MoveRequested,
    PreparedRequest,
    PromptAdvanced,
    PromptEmbedded,
    PromptScored,
    RequestFailed,
    RequestUsage,
    StaleRequest,
)

Event = (
    AdmittedRequest
    | StaleRequest
    | RequestFailed
    | PromptAdvanced
    | PromptEmbedded
    | PromptScored
    | ChoiceOutput
    | PreparedRequest
    | MoveRequested
    | RequestUsage
)
TERMINAL = (StaleRequest, RequestFailed, RequestUsage)


class RequestStream:
    """Events of one request, in order."""

    def __init__(self, key: int, name: str, limit: int, *, is_held: bool = False) -> None:
        self.key = key
        # Whether it waits to be resumed.
        self.is_held = is_held
        # "request_id/attempt", as load reports name it.
        self.name = name
        self.admitted = False
        # Called at every event; `take` waits by itself.
        self.listener: Callable[[], None] | None = None
        self._events: deque[Event] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self._terminal: Event | None = None

    @property
    def is_ended(self) -> bool:
        """Whether its terminal event has come; the engine has forgotten it then."""
        return self._terminal is not None

    def put(self, event: Event) -> bool:
        """Add an event; False when the reader has left too many (the event is dropped). Nothing follows a terminal."""
        if self._terminal is not None:
            return True
        if isinstance(event, TERMINAL):
            self._terminal = event
        elif len(self._events) >= self._limit:
            return False
        self._events.append(event)
        self._wake.set()
        if self.listener is not None:
            self.listener()
        return True

    async def take(self) -> list[Event]:
        """All events that wait, at least one. The caller's own deadline bounds the wait."""
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        return self.drain()

    def drain(self) -> list[Event]:
        """All events that wait."""
        events = list(self._events)
        self._events.clear()
        return events


class StreamTable:
    """Open streams by key."""

    def __init__(self, *, max_requests: int, stream_queue: int) -> None:
        self._streams: dict[int, RequestStream] = {}
        self._max_requests = max_requests
        self._stream_queue = stream_queue
        self._keys = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_full(self) -> bool:
        """Whether no further request may be opened."""
        return len(self._streams) >= self._max_requests

    def open(self, name: str, *, is_held: bool = False) -> RequestStream:
        """A stream under a key that was never used."""
        self._keys += 1
        stream = RequestStream(self._keys, name, self._stream_queue, is_held=is_held)
        self._streams[stream.key] = stream
        self._empty.clear()
        return stream

    def get(self, key: int) -> RequestStream | None:
        """The open stream of `key`."""
        return self._streams.get(key)

    def close(self, key: int) -> RequestStream | None:
        """Forget a stream; None when that has happened already."""
        stream = self._streams.pop(key, None)
        if not self._streams:
            self._empty.set()
        return stream

    def admitted(self) -> list[RequestStream]:
        """The open streams whose requests have their places."""
        return [stream for stream in self._streams.values() if stream.admitted and not stream.is_ended]

    def fail_all(self, code: str, detail: str) -> None:
        """End every open stream with an error."""
        for stream in list(self._streams.values()):
            stream.put(RequestFailed(stream.key, code, detail))

    async def wait_empty(self) -> None:
        """Until no stream is open."""
        await self._empty.wait()
