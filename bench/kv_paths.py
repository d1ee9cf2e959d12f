"""The ways from one process to another that `bench.kv` measures, each as a call that brings some blocks over once.

All of them walk round the same blocks, so that none is measured out of the cache alone.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.kv_holder import NUM_BLOCKS, SOCKET_REQUEST, block_format, block_ids
from services.common.transfer.header import verify_block
from services.common.transfer.protocol import PeerAddress, PullRequest, Transport

_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Which blocks: their size, how many of one call are in flight, and whether each is verified as it arrives."""

    block_bytes: int
    in_flight: int
    verified: bool

    @property
    def num_bytes(self) -> int:
        """Of one call."""
        return self.block_bytes * self.in_flight


# Brings the blocks of one call over; its argument counts the calls.
Fetch = Callable[[int], Awaitable[None]]


class Buffers:
    """Destination slots, touched once so that page faults are not measured."""

    def __init__(self, block_bytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, NUM_BLOCKS * block_bytes))
        self.memory[:] = bytes(len(self.memory))
        self.slots = [self.memory[i * block_bytes : (i + 1) * block_bytes] for i in range(NUM_BLOCKS)]


def first_block(call: int, in_flight: int) -> int:
    """Where the blocks of a call begin."""
    return call * in_flight % (NUM_BLOCKS - in_flight + 1)


def memcpy_path(cell: Cell, target: Buffers) -> Fetch:
    """Copies within this process, the ceiling of whatever copies once."""
    source = Buffers(cell.block_bytes)

    async def fetch(call: int) -> None:
        first = first_block(call, cell.in_flight) * cell.block_bytes
        target.memory[first : first + cell.num_bytes] = source.memory[first : first + cell.num_bytes]

    return fetch


def socket_path(cell: Cell, target: Buffers, connection: socket.socket) -> Fetch:
    """A plain blocking TCP socket, received into place, with nothing around the payload."""

    async def fetch(call: int) -> None:
        first = first_block(call, cell.in_flight)
        connection.sendall(SOCKET_REQUEST.pack(first, cell.in_flight, cell.block_bytes))
        connection.recv_into(target.memory[first * cell.block_bytes :], cell.num_bytes, socket.MSG_WAITALL)

    return fetch


def transport_path(cell: Cell, target: Buffers, transport: Transport, peer: PeerAddress) -> Fetch:
    """Pulls as a worker makes them."""
    ids, expected = block_ids(cell.block_bytes), block_format(cell.block_bytes)

    async def fetch(call: int) -> None:
        first = first_block(call, cell.in_flight)
        wanted = ids[first : first + cell.in_flight]
        buffers = target.slots[first : first + cell.in_flight]

        def on_block(index: int, header: bytes, tier: str) -> None:
            if cell.verified:
                verify_block(header, buffers[index], wanted[index], expected)

        result = await transport.pull(peer, PullRequest(wanted, 0, _DEADLINE_S), buffers, on_block)
        if result.num_blocks != cell.in_flight:
            raise RuntimeError(f"{transport.name}: {result.num_blocks} of {cell.in_flight} blocks, {result.stop}")

    return fetch
