"""Framed msgspec messages over a connected Unix stream socket, for a blocking loop and for asyncio.

A frame is a little-endian u32 length and that many bytes of msgpack. Frames above MAX_FRAME_BYTES mean that the two
ends disagree and end the connection. A closed peer is ConnectionError on either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from services.worker.messages import Message

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20
T = TypeVar("T")


def encode_frame(message: Message) -> bytes:
    """The frame of one message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class _FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        begin = 0
        while len(self._data) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, begin)
            if length > MAX_FRAME_BYTES:
                raise ConnectionError(f"frame of {length} bytes")
            end = begin + _LENGTH.size + length
            if len(self._data) < end:
                break
            yield bytes(self._data[begin + _LENGTH.size : end])
            begin = end
        del self._data[:begin]


class Link(Generic[T]):
    """The end of a blocking loop. Sends never block: what the peer does not take yet is kept, up to a bound."""

    def __init__(self, sock: socket.socket, receives: Any, *, max_unsent_bytes: int = 256 * 2**20) -> None:
        """receives: the union of message types that come in."""
        sock.setblocking(False)
        self.socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._incoming = _FrameBuffer()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._max_unsent_bytes = max_unsent_bytes

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has work to do."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Queue and try to send. Raises ConnectionError when the peer is gone or has stopped reading."""
        self.send_all((message,))

    def send_all(self, messages: Sequence[Message]) -> None:
        """The same for several, by one write as far as the socket takes it: the peer wakes once."""
        if messages:
            frames = memoryview(b"".join(map(encode_frame, messages)))
            self._unsent.append(frames)
            self._unsent_bytes += len(frames)
        if self._unsent_bytes > self._max_unsent_bytes:
            raise ConnectionError("the peer has stopped reading")
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            self._unsent_bytes -= sent
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def receive(self) -> list[T]:
        """Every message that has arrived, without waiting. Raises ConnectionError when the peer is gone."""
        messages: list[T] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.socket.recv(_READ_BYTES)
                if not data:
                    raise ConnectionError("the peer closed the link")
                messages.extend(self._decoder.decode(frame) for frame in self._incoming.feed(data))
        return messages


def wait_links(links: Iterable[Link[Any]], timeout_s: float) -> bool:
    """Wait until a link has something to receive (or room for what is unsent), at most `timeout_s`; whether one has."""
    # Not select(), which knows no descriptor above 1023.
    poll = select.poll()
    for link in links:
        poll.register(link.socket, select.POLLIN | (select.POLLOUT if link.has_unsent else 0))
    return bool(poll.poll(timeout_s * 1000))


class AsyncLink(Generic[T]):
    """The end of an asyncio process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._incoming = _FrameBuffer()
        self._received: deque[T] = deque()

    @classmethod
    async def open(cls, sock: socket.socket, receives: Any) -> AsyncLink[T]:
        """Wrap a connected socket; `receives` is the union of message types that come in."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_FRAME_BYTES)
        return cls(reader, writer, receives)

    def send(self, message: Message) -> None:
        """Queue a message; `drain` gives back-pressure."""
        self._writer.write(encode_frame(message))

    async def drain(self) -> None:
        """Wait until the transport's buffer is below its high-water mark."""
        await self._writer.drain()

    async def receive(self) -> T:
        """The next message. Raises ConnectionError when the peer is gone."""
        await self._wait()
        return self._received.popleft()

    async def receive_all(self) -> list[T]:
        """Every message that has arrived, at least one. Raises ConnectionError when the peer is gone."""
        await self._wait()
        messages = list(self._received)
        self._received.clear()
        return messages

    async def _wait(self) -> None:
        while not self._received:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise ConnectionError("the peer closed the link")
            self._received.extend(self._decoder.decode(frame) for frame in self._incoming.feed(data))

    async def close(self) -> None:
        """Close the socket."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
