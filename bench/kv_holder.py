"""The other process of `bench.kv`: holds blocks and serves them over every transport, and over a plain socket.

Prints its addresses as JSON; ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence

import numpy as np

from services.common.blocks import BlockId, chain_block_ids
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.telemetry import configure_logging
from services.common.transfer.endpoint import TransferEndpoint
from services.common.transfer.header import BlockFormat, Segment, make_header
from services.common.transfer.protocol import STOP_COMPLETE, STOP_MISSING, HeldBlock, PullRequest
from services.common.transfer.shm_regions import Region, create_region
from services.worker.mover.serving import RefusingSink

SECRET = MeshSecret("a secret for measuring")
NUM_BLOCKS = 48
BLOCK_SIZES = (256 * 1024, 2**20, 4 * 2**20)
NUM_KV_HEADS = 8
SOCKET_REQUEST = struct.Struct("<III")
_KEY = bytes(32)


def block_format(block_bytes: int) -> BlockFormat:
    """Blocks of a model with 8 KV heads, each with its checksum."""
    segment = Segment(0, 1, (NUM_KV_HEADS, block_bytes // NUM_KV_HEADS // 2), "bfloat16")
    return BlockFormat(b"m" * 16, "bfloat16", NUM_KV_HEADS, block_bytes, (segment,))


def block_ids(block_bytes: int) -> list[BlockId]:
    """Ids of the blocks of one size."""
    return chain_block_ids(_KEY, BlockId(block_bytes.to_bytes(16, "little")), range(16 * NUM_BLOCKS))


class MeasuredSource:
    """All blocks, always."""

    def __init__(self) -> None:
        self.memory: dict[int, memoryview] = {}
        self.regions: list[Region] = []
        self._blocks: dict[BlockId, HeldBlock] = {}
        for size in BLOCK_SIZES:
            region = create_region("kvmesh-bench", NUM_BLOCKS * size)
            assert region is not None, "needs Linux"
            self.regions.append(region)
            memory = self.memory[size] = region.view
            memory[:] = np.random.default_rng(size).bytes(len(memory))
            for index, block_id in enumerate(block_ids(size)):
                payload = memory[index * size : (index + 1) * size]
                self._blocks[block_id] = HeldBlock(make_header(block_format(size), block_id, payload), payload, "ram")

    async def lease(self, request: PullRequest) -> MeasuredLease:
        """Whatever of the request is known."""
        blocks = [self._blocks[block_id] for block_id in request.ids if block_id in self._blocks]
        return MeasuredLease(blocks, STOP_COMPLETE if len(blocks) == len(request.ids) else STOP_MISSING)


class MeasuredLease:
    """Blocks that never move."""

    def __init__(self, blocks: Sequence[HeldBlock], stop: str) -> None:
        self.blocks = blocks
        self.stop = stop

    def release(self, num_sent: int, stop: str) -> None:
        """Nothing to give back."""


def serve_socket(listener: socket.socket, source: MeasuredSource) -> None:
    """Plain blocking sockets, the measure of what this machine's loopback can do."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(SOCKET_REQUEST.size, socket.MSG_WAITALL):
        first, count, size = SOCKET_REQUEST.unpack(request)
        connection.sendall(source.memory[size][first * size : (first + count) * size])


async def serve() -> None:
    """Serve over every transport until stdin closes."""
    source = MeasuredSource()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_socket, args=(listener, source), daemon=True).start()
    endpoint = TransferEndpoint("auto", SECRET, source, RefusingSink(), max_operation_s=30.0, regions=source.regions)
    server = MeshServer("127.0.0.1:0", secret=SECRET)
    endpoint.attach(server)
    pull_address = endpoint.listen("127.0.0.1:0")
    grpc_address = await server.start()
    endpoint.listen_shm(grpc_address)
    await server.set_ready(True)
    addresses = {"pull_address": pull_address, "grpc_address": grpc_address, "port": listener.getsockname()[1]}
    print(json.dumps(addresses), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    configure_logging("bench", "holder", "WARNING")
    asyncio.run(serve())
    # UCX's own teardown at interpreter exit can hang, and the socket's thread may be waiting.
    os._exit(0)
