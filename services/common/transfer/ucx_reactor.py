"""UCX inside an asyncio loop: one worker, progressed when its file descriptor is ready, completions as plain calls.

The only module that imports ucxx. It does not use ucxx's own asyncio layer, whose waits spin: here the worker is
armed whenever nothing moves, so an idle process sleeps. One step progresses, calls back and takes what the callbacks
posted until nothing moves any more, so a control message and the receives it leads to cost one turn of the loop.

A posted buffer belongs to UCX until its callback is called, whoever has given up on it meanwhile. Closing an endpoint
here is the forced kind, which ends all its requests at once; an orderly close would wait for a silent peer and
let it write into buffers afterwards (both were tried). Active messages are not used: ucxx files unread ones under
the endpoint's handle, which UCX gives to a later connection, so that one would read another's messages (seen).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.transfer.errors import PeerLost

# Measured: six times the throughput of the defaults over TCP. With reused addresses a process that was killed gets its
# port again at once. Whatever the user has set in the environment wins.
TUNING = {
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_CM_REUSEADDR": "y",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# The system's list of RDMA devices.
RDMA_DEVICES = Path("/sys/class/infiniband")
_CLOSE_WAIT_NS = 100_000_000
# UCX's file descriptor sometimes stays quiet though there is something to do, mostly while a connection is made. So
# the worker is progressed this often anyway, and more often for a while after something was posted.
_IDLE_TICK_S = 0.2
_BUSY_TICK_S = 0.005
_BUSY_S = 0.5
_TAG_BITS = 64
# Rounds of progress in one turn of the loop; others wait for so long at most.
_MAX_ROUNDS = 16

# Called from the loop when UCX is done with a buffer: None, or why it failed.
OnDone = Callable[[PeerLost | None], None]


def transports(rdma_devices: Path = RDMA_DEVICES) -> str:
    """What UCX may use: RDMA where there are devices, else TCP. Not its shared memory, which knows no dead peers."""
    has_rdma = rdma_devices.is_dir() and any(rdma_devices.iterdir())
    return "rc,ud,tcp" if has_rdma else "tcp"


def apply_tuning() -> None:
    """Set UCX's environment. Works only before the first import of ucxx in this process."""
    for name, value in {"UCX_TLS": transports(), **TUNING}.items():
        os.environ.setdefault(name, value)


def ucx_importable() -> bool:
    """Whether this process can use UCX."""
    apply_tuning()
    try:
        import ucxx  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


class UcxEndpoint:
    """One end of a UCX connection, before any handshake."""

    def __init__(self, reactor: UcxReactor, raw: Any) -> None:
        self._reactor = reactor
        self._raw = raw
        self.closed = False
        self._on_closed: Callable[[], None] | None = None
        raw.set_close_callback(self._peer_closed)

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called from the loop when the connection breaks, at once when it has."""
        self._on_closed = callback
        if self.closed:
            self._reactor.loop.call_soon(callback)

    async def stream_send(self, buffer: bytes) -> None:
        """Send bytes that only this connection's other end can receive. Cancelled, it goes on by itself."""
        await self._wait_for("stream_send", buffer)

    async def stream_recv(self, buffer: bytearray) -> None:
        """Receive as many bytes as the buffer has, which must be one `stream_send` of the other end."""
        await self._wait_for("stream_recv", buffer)

    def tag_send(self, buffer: bytes | memoryview, tag: int, on_done: OnDone) -> None:
        """Send `buffer`; it must not change until `on_done` is called."""
        self._post(on_done, "tag_send", buffer, self._reactor.tag(tag))

    def tag_recv(self, buffer: bytearray | memoryview, tag: int, on_done: OnDone) -> None:
        """Receive into `buffer`, which is UCX's until `on_done` is called."""
        self._post(on_done, "tag_recv", buffer, self._reactor.tag(tag))

    def extent(self, buffer: memoryview) -> tuple[int, int]:
        """Address and size of a buffer."""
        return self._reactor.array(buffer).ptr, len(buffer)

    def close(self) -> None:
        """Close at once: requests of this endpoint end, and its peer's writes reach nobody."""
        if self._raw is None:
            return
        raw, self._raw = self._raw, None
        self.closed = True
        raw.close_blocking(period=_CLOSE_WAIT_NS, max_attempts=1)
        raw.remove_close_callback()
        self._reactor.wake()

    def _post(self, on_done: OnDone, operation: str, buffer: bytes | bytearray | memoryview, *tag: object) -> None:
        if self.closed:
            self._reactor.loop.call_soon(on_done, PeerLost("connection closed"))
            return
        array = self._reactor.array(buffer)
        self._reactor.watch(getattr(self._raw, operation)(array, *tag), on_done, (array, buffer))

    async def _wait_for(self, operation: str, buffer: bytes | bytearray) -> None:
        waiting: asyncio.Future[PeerLost | None] = self._reactor.loop.create_future()

        def done(error: PeerLost | None) -> None:
            if not waiting.done():
                waiting.set_result(error)

        self._post(done, operation, buffer)
        if (error := await waiting) is not None:
            raise error

    def _peer_closed(self, *_: object) -> None:
        # UCX calls this in the middle of its progress: only note it there.
        if not self.closed:
            self.closed = True
            if self._on_closed is not None:
                self._reactor.loop.call_soon(self._on_closed)


class UcxReactor:
    """One UCX worker bound to the running loop."""

    def __init__(self, spin_s: float = 0.0) -> None:
        apply_tuning()
        import ucxx
        from ucxx._lib.arr import Array

        self.loop = asyncio.get_running_loop()
        self._api = ucxx.libucxx
        self._array_type = Array
        self._tag_type = ucxx.types.Tag
        self._context = self._api.UCXContext()
        self._worker = self._api.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._pending: list[tuple[Any, OnDone, object]] = []
        self._spin_s = spin_s
        self._spin_until_s = 0.0
        self._scheduled = False
        self._listeners: list[Any] = []
        self._busy_until_s = 0.0
        self._tick: asyncio.TimerHandle | None = None
        self._fd: int = self._worker.epoll_file_descriptor
        self.loop.add_reader(self._fd, self._step)
        self._schedule_tick()
        self.wake()

    @property
    def num_pending(self) -> int:
        """Requests that UCX has not completed."""
        return len(self._pending)

    def connect(self, host: str, port: int) -> UcxEndpoint:
        """Begin to connect; errors show at the first message."""
        try:
            raw = self._api.UCXEndpoint.create(self._worker, host, port, True)
        except self._api.UCXError as error:
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from None
        self.wake()
        return UcxEndpoint(self, raw)

    def listen(self, port: int, on_endpoint: Callable[[UcxEndpoint], None]) -> int:
        """Listen on all interfaces (UCX takes no address here); returns the port."""

        def accepted(raw: Any) -> None:
            endpoint = UcxEndpoint(self, raw)
            self.loop.call_soon(on_endpoint, endpoint)

        try:
            listener = self._api.UCXListener.create(
                worker=self._worker, port=port, cb_func=accepted, deliver_endpoint=True
            )
        except self._api.UCXError as error:
            raise RuntimeError(f"cannot listen on UCX port {port}: {error}") from None
        self._listeners.append(listener)
        self.wake()
        return int(listener.port)

    def array(self, buffer: bytes | bytearray | memoryview) -> Any:
        """UCX's view of a buffer; it keeps nothing alive."""
        return self._array_type(buffer)

    def tag(self, value: int) -> Any:
        """UCX's tag of 64 bits."""
        return self._tag_type(value & ((1 << _TAG_BITS) - 1))

    def watch(self, request: Any, on_done: OnDone, keep: object) -> None:
        """Have `on_done` called when UCX is done; request and `keep` stay alive until then."""
        self._pending.append((request, on_done, keep))
        now_s = time.perf_counter()
        self._spin_until_s = now_s + self._spin_s
        if now_s > self._busy_until_s:
            self._schedule_tick(_BUSY_TICK_S)
        self._busy_until_s = now_s + _BUSY_S
        self.wake()

    def wake(self) -> None:
        """Progress at the loop's next turn, or further in this one's step."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._step)

    def close(self) -> None:
        """Stop listening and stop progressing. Endpoints must have been closed."""
        self._listeners.clear()
        self._worker.progress()
        self.loop.remove_reader(self._fd)
        if self._tick is not None:
            self._tick.cancel()
        self._scheduled = True

    def _schedule_tick(self, delay_s: float = 0.0) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._tick = self.loop.call_later(delay_s, self._on_tick)

    def _on_tick(self) -> None:
        self.wake()
        self._schedule_tick(_BUSY_TICK_S if time.perf_counter() < self._busy_until_s else _IDLE_TICK_S)

    def _step(self) -> None:
        self._scheduled = True
        moved = False
        for _ in range(_MAX_ROUNDS):
            self._worker.progress()
            if self._complete():
                moved = True
            elif self._worker.arm():
                self._scheduled = False
                if moved:
                    self._spin_until_s = time.perf_counter() + self._spin_s
                break
        if self._scheduled or (self._spin_s and time.perf_counter() < self._spin_until_s):
            self._scheduled = True
            self.loop.call_soon(self._step)

    def _complete(self) -> bool:
        """Call back for what UCX has completed, in the order of posting; callbacks may post and close."""
        waiting, self._pending = self._pending, []
        done = [entry for entry in waiting if entry[0].completed]
        if not done:
            self._pending = waiting
            return False
        left = [entry for entry in waiting if not entry[0].completed]
        self._pending = left
        for request, on_done, _ in done:
            try:
                on_done(self._error_of(request))
            except Exception as error:
                # As in any callback of the loop: the others still get theirs.
                self.loop.call_exception_handler({"message": "a completion failed", "exception": error})
        return True

    def _error_of(self, request: Any) -> PeerLost | None:
        try:
            request.check_error()
        except self._api.UCXError as error:
            return PeerLost(str(error))
        return None
