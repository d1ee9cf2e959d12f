"""The two ends of the link between rank 0 and another rank: steps and parts of blocks (step_frames.py).

A stream socket, Unix on one host, TCP between two. The other rank does one thing after the other, in the order in which
it is told. Rank 0 does not wait while it sends parts: what the socket does not take goes on when it asks for their end.
At most one step is under way; before one is sent, `settle` has all parts arrive, so that the other rank never waits for
rank 0 to read while this waits for its step. Parts travel in frames of at most FRAME_BYTES, or of one block; between
two the other rank says that it lives.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.errors import RankLost
from services.worker.model.step import StepInput
from services.worker.parallel.step_frames import (
    DONE,
    PARTS,
    ByteArray,
    GatherParts,
    ScatterParts,
    gather_frame,
    read_frame,
    scatter_frame,
    step_frame,
)

# A slow network, of 1 Gbit/s, takes 34 ms for it.
FRAME_BYTES = 2**22


@dataclass(slots=True)
class PartsCopy:
    """A Copy (block_transfers.py) of parts that are on their way."""

    link: StepLink
    done: bool = False

    def is_done(self) -> bool:
        """Whether they have left or come; sends and receives what the socket takes and has. Raises RankLost."""
        if not self.done:
            self.link.poll()
        return self.done


@dataclass(slots=True)
class _Coming:
    """One frame of parts; the last one of a copy has what is done when all have come."""

    memory: memoryview
    come: Callable[[], None] | None


class StepLink:
    """Rank 0's end. timeout_s: longest wait for anything."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._timeout_s = timeout_s
        # What is to be sent, each with the copy that ends with it.
        self._unsent: deque[tuple[memoryview, PartsCopy | None]] = deque()
        self._coming: deque[_Coming] = deque()
        # Where received bytes go: into parts that are coming, or into the byte that says what comes.
        self._kind = bytearray(1)
        self._target = memoryview(self._kind)
        self._reads_parts = False
        self._num_done = 0

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._unsent)

    def send(self, step: StepInput) -> None:
        """Have the rank run a step; `settle` first. It leaves as a whole: nobody sends on while rank 0 computes.

        Raises RankLost.
        """
        self._queue(step_frame(step), None)
        self._wait(lambda: not self._unsent, "takes no steps")

    def wait_done(self) -> None:
        """Until the step is finished. Raises RankLost."""
        self._wait(lambda: self._num_done > 0, "does not finish its step")
        self._num_done -= 1

    def gather(self, slots: Sequence[int], memory: memoryview, take: Callable[[], None]) -> PartsCopy:
        """Have the rank's parts of the blocks in pool slots fill `memory`; then `take` is called. Raises RankLost."""
        copy = PartsCopy(self)

        def come() -> None:
            take()
            copy.done = True

        for part_slots, part in _frames(slots, memory):
            self._coming.append(_Coming(part, None))
            self._queue(gather_frame(part_slots), None)
        self._coming[-1].come = come
        self.poll()
        return copy

    def scatter(self, slots: Sequence[int], parts: memoryview) -> PartsCopy:
        """Have the rank put its parts into pool slots before any later step; they stay as they are. Raises RankLost."""
        copy = PartsCopy(self)
        for part_slots, part in _frames(slots, parts):
            self._queue(scatter_frame(part_slots, part.nbytes), None)
            self._queue(part, None)
        self._unsent[-1] = self._unsent[-1][0], copy
        self.poll()
        return copy

    def settle(self) -> None:
        """Until all parts have left and come. Raises RankLost."""
        self._wait(lambda: not self._unsent and not self._coming, "does not exchange its parts of blocks")

    def poll(self, wait_s: float = 0.0) -> None:
        """Send and receive what the socket takes and has. Raises RankLost."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        for _, event in poll.poll(wait_s * 1000):
            try:
                if event & select.POLLOUT:
                    self._send()
                if event & ~select.POLLOUT:
                    self._receive()
            except BlockingIOError:
                pass
            except OSError as error:
                raise RankLost(f"another rank is gone: {error}") from error

    def _wait(self, is_over: Callable[[], bool], failing: str) -> None:
        until_s = time.monotonic() + self._timeout_s
        while not is_over():
            wait_s = until_s - time.monotonic()
            if wait_s <= 0:
                raise RankLost(f"another rank {failing}: timed out")
            self.poll(wait_s)

    def _queue(self, data: bytes | memoryview, copy: PartsCopy | None) -> None:
        self._unsent.append((memoryview(data), copy))

    def _send(self) -> None:
        while self._unsent:
            data, copy = self._unsent[0]
            sent = self.socket.send(data)
            if sent < data.nbytes:
                self._unsent[0] = data[sent:], copy
                continue
            self._unsent.popleft()
            if copy is not None:
                copy.done = True

    def _receive(self) -> None:
        while True:
            received = self.socket.recv_into(self._target)
            if not received:
                raise RankLost("another rank has gone in the midst of a step")
            self._target = self._target[received:]
            if not self._target.nbytes:
                self._received()

    def _received(self) -> None:
        """What was awaited is here."""
        if self._reads_parts:
            come = self._coming.popleft().come
            if come is not None:
                come()
        elif self._kind == DONE:
            self._num_done += 1
        elif self._kind != PARTS or not self._coming:
            raise RankLost(f"another rank is out of step: it says {bytes(self._kind)!r}")
        self._reads_parts = not self._reads_parts and self._kind == PARTS
        self._target = self._coming[0].memory if self._reads_parts else memoryview(self._kind)


def _frames(slots: Sequence[int], parts: memoryview) -> Iterator[tuple[Sequence[int], memoryview]]:
    """slots: at least one. parts: as many of equal size, one after the other."""
    part_bytes = parts.nbytes // len(slots)
    count = max(1, FRAME_BYTES // part_bytes)
    for first in range(0, len(slots), count):
        yield slots[first : first + count], parts[first * part_bytes : (first + count) * part_bytes]


class RankLink:
    """The other rank's end. timeout_s: of every operation."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        self.socket = sock

    def receive(self) -> StepInput | GatherParts | ScatterParts:
        """Wait for what rank 0 wants. Raises RankLost."""
        return read_frame(self._read)

    def tell_done(self) -> None:
        """The step's KV is in the pool. Raises RankLost."""
        self._send(DONE)

    def give_parts(self, parts: ByteArray) -> None:
        """The answer to GatherParts. Raises RankLost."""
        self._send(PARTS)
        self._send(np.ascontiguousarray(parts).data)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise RankLost(f"rank 0 is gone: {error}") from error

    def _read(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                received = self.socket.recv_into(view)
            except OSError as error:
                raise RankLost(f"rank 0 sends half a step: {error}") from error
            if not received:
                raise RankLost("rank 0 has gone")
            view = view[received:]
