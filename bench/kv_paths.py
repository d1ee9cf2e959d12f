"""The ways that `bench.kv` measures, each as a call that brings the blocks of one pull over once.

Ceilings first: memcpy, a plain blocking socket, checksums, the bare disk; then pulls as a worker makes them. All walk
round blocks of their own, so that none but those that say so are measured out of the processor's cache.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.kv_node import block_format, chain
from bench.kv_peers import walked_blocks
from bench.kv_socket import REQUEST
from services.common.blocks import BlockId
from services.common.transfer.header import decode_header, make_header, verify_block, verify_payload
from services.common.transfer.protocol import PeerAddress, PullRequest, Transport
from services.common.transfer.shm_client import ShmTransport

# A block in shared memory is read by the holder's directory, or asked for and lent.
ONE_SIDED, ASKED = "one-sided", "asked"
_DEADLINE_S = 30.0
# A read from the page cache is tried so often; a page that the system has dropped is brought back in between.
_CACHED_TRIES = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """Size of the blocks and how many of one pull are in flight."""

    block_bytes: int
    in_flight: int

    @property
    def num_bytes(self) -> int:
        """Of one pull."""
        return self.block_bytes * self.in_flight


# Brings the blocks of one pull over.
Fetch = Callable[[], Awaitable[None]]


class Buffers:
    """Destination slots, touched once so that page faults are not measured. Page-aligned, as O_DIRECT wants them."""

    def __init__(self, block_bytes: int, num_blocks: int = 0) -> None:
        count = num_blocks or walked_blocks(block_bytes)
        self.memory = memoryview(mmap.mmap(-1, count * block_bytes))
        self.memory[:] = bytes(len(self.memory))
        self.slots = [self.memory[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]


def walk(cell: Cell, num_blocks: int) -> Iterator[int]:
    """Where the blocks of one pull after the other begin."""
    return itertools.cycle(range(0, num_blocks - cell.in_flight + 1, cell.in_flight))


def memcpy_path(cell: Cell, source: Buffers, target: Buffers) -> Fetch:
    """Copies within this process, the ceiling of whatever copies once."""
    starts = walk(cell, len(target.slots))

    async def fetch() -> None:
        first = next(starts) * cell.block_bytes
        target.memory[first : first + cell.num_bytes] = source.memory[first : first + cell.num_bytes]

    return fetch


def socket_path(cell: Cell, target: Buffers, connection: socket.socket) -> Fetch:
    """A plain blocking TCP socket, received into place, with nothing around the payload."""
    starts = walk(cell, len(target.slots))

    async def fetch() -> None:
        first = next(starts)
        connection.sendall(REQUEST.pack(first * cell.block_bytes, cell.num_bytes))
        connection.recv_into(target.memory[first * cell.block_bytes :], cell.num_bytes, socket.MSG_WAITALL)

    return fetch


def checksum_path(cell: Cell, *, cached: bool) -> Fetch:
    """Verification of blocks that have arrived, always the same one or a walk through memory."""
    blocks = Buffers(cell.block_bytes)
    blocks.memory[:] = np.random.default_rng(0).bytes(len(blocks.memory))
    shown = blocks.slots[:1] if cached else blocks.slots
    layout, ids = block_format(cell.block_bytes), chain(0, len(shown))
    headers = [decode_header(make_header(layout, block_id, slot)) for block_id, slot in zip(ids, shown, strict=True)]
    turns = itertools.cycle(list(zip(headers, shown, strict=True)))

    async def fetch() -> None:
        for header, slot in itertools.islice(turns, cell.in_flight):
            verify_payload(header, slot)

    return fetch


class DiskFile:
    """A file to be read with nothing around it: `in_flight` threads, one block each. Close it."""

    def __init__(self, path: Path, num_bytes: int, threads: int, *, cached: bool) -> None:
        """cached: through the page cache, which holds all of it; otherwise past it (OSError where that cannot be)."""
        self.num_bytes = num_bytes
        self._threads = ThreadPoolExecutor(threads)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (0 if cached else os.O_DIRECT), 0o600)
        self._cached = cached
        if os.fstat(self._fd).st_size < num_bytes:
            self._fill()
        if cached:
            self._read_whole()

    def close(self) -> None:
        """Close the file and end the threads."""
        self._threads.shutdown()
        os.close(self._fd)

    async def read(self, offset: int, slots: Sequence[memoryview]) -> None:
        """Blocks that lie one after the other. Raises OSError when one is not in the page cache but should be."""
        places = [offset + i * len(slots[0]) for i in range(len(slots))]
        if len(slots) == 1:
            self._read_one(slots[0], places[0])
        else:
            list(self._threads.map(self._read_one, slots, places))

    def _read_one(self, slot: memoryview, offset: int) -> None:
        flags = os.RWF_NOWAIT if self._cached else 0
        for _ in range(_CACHED_TRIES):
            with contextlib.suppress(BlockingIOError):
                if os.preadv(self._fd, [slot], offset, flags) == len(slot):
                    return
            # The system has dropped a page meanwhile: bring it back.
            os.preadv(self._fd, [slot], offset)
        raise OSError(f"{len(slot)} bytes at {offset} did not come at once")

    def _fill(self) -> None:
        chunk = Buffers(8 * 2**20, 1).memory
        chunk[:] = os.urandom(len(chunk))
        for offset in range(0, self.num_bytes, len(chunk)):
            os.pwrite(self._fd, chunk, offset)
        os.fsync(self._fd)

    def _read_whole(self) -> None:
        chunk = bytearray(8 * 2**20)
        for offset in range(0, self.num_bytes, len(chunk)):
            os.preadv(self._fd, [chunk], offset)


def disk_path(cell: Cell, target: Buffers, file: DiskFile) -> Fetch:
    """The disk, or its page cache, with nothing around it."""
    offsets = itertools.cycle(range(0, file.num_bytes - cell.num_bytes + 1, cell.num_bytes))
    starts = walk(cell, len(target.slots))

    async def fetch() -> None:
        first = next(starts)
        await file.read(next(offsets), target.slots[first : first + cell.in_flight])

    return fetch


class ShortAnswer(Exception):
    """A pull ended before its last block."""


@dataclass(slots=True)
class Seen:
    """What pulls turned out to be: the tiers that blocks came from, and how blocks in shared memory were found."""

    paths: set[str] = field(default_factory=set)
    tiers: set[str] = field(default_factory=set)

    def clear(self) -> None:
        """Forget what was seen."""
        self.paths.clear()
        self.tiers.clear()


class Wanted:
    """What pulls ask for, one after the other; two paths that share one never ask for the same soon after."""

    def __init__(self, pulls: Sequence[Sequence[BlockId]]) -> None:
        self._turns = itertools.cycle(pulls)

    def take(self) -> Sequence[BlockId]:
        """The next ids."""
        return next(self._turns)


def walk_chain(cell: Cell, ids: Sequence[BlockId]) -> Wanted:
    """Pulls of parts of one chain that is in RAM."""
    return Wanted([ids[i : i + cell.in_flight] for i in range(0, len(ids) - cell.in_flight + 1, cell.in_flight)])


def transport_path(
    cell: Cell, target: Buffers, transport: Transport, peer: PeerAddress, wanted: Wanted, seen: Seen, *, verify: bool
) -> Fetch:
    """Pulls as a worker makes them."""
    expected, starts = block_format(cell.block_bytes), walk(cell, len(target.slots))

    async def fetch() -> None:
        first, ids = next(starts), wanted.take()
        buffers = target.slots[first : first + cell.in_flight]

        def on_block(index: int, header: bytes, tier: str) -> None:
            seen.tiers.add(tier)
            if verify:
                verify_block(header, buffers[index], ids[index], expected)

        before = transport.statistics() if isinstance(transport, ShmTransport) else None
        result = await transport.pull(peer, PullRequest(ids, 0, _DEADLINE_S), buffers, on_block)
        if before is not None and isinstance(transport, ShmTransport):
            after = transport.statistics()
            seen.paths |= {ONE_SIDED} if after.read_blocks > before.read_blocks else set()
            seen.paths |= {ASKED} if after.lent_blocks > before.lent_blocks else set()
        if result.num_blocks != cell.in_flight:
            raise ShortAnswer(f"{transport.name}: {result.num_blocks} of {cell.in_flight} blocks, {result.stop}")

    return fetch
