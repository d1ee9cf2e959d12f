"""A process that holds blocks and keeps pushed ones: `python -m tests.common.transfer.holder --transport ucx …`.

Prints its addresses as JSON and serves until killed. Every line on stdin is answered with a line of JSON: counts of
open leases, of what was pushed and of what was read by the directory; a line "strike N" strikes block N off it first,
a line "compute N" makes blocks up to number N appear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from hashlib import blake2b

from services.common.blocks import BlockId
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.common.telemetry import configure_logging
from services.common.transfer.endpoint import TransferEndpoint
from services.common.transfer.errors import BlockInvalid
from services.common.transfer.header import decode_header, verify_payload
from services.common.transfer.protocol import (
    STOP_COMPLETE,
    STOP_EPOCH,
    STOP_HEADS,
    STOP_MISSING,
    HeldBlock,
    PullRequest,
)
from services.common.transfer.shares import narrowed
from services.common.transfer.shm_directory import BlockDirectory, ShownDirectory
from services.common.transfer.shm_regions import create_region
from tests.common.transfer.blocks import EPOCH, SECRET, chain, header, payload


class Holder:
    """Source of one chain, sink of anything valid."""

    def __init__(
        self, count: int, block_bytes: int, *, hang: bool, spoil: int, commit_s: float, computed: int | None = None
    ) -> None:
        ids = chain(count)
        self.blocks: dict[BlockId, HeldBlock] = {}
        region = create_region("kvmesh-holder", max(1, count) * block_bytes)
        assert region is not None
        self.region = region
        for index, block_id in enumerate(ids):
            data = payload(block_id, block_bytes)
            encoded = header(ids, index, data)
            if index == spoil:
                data = data[:-1] + bytes([data[-1] ^ 128])
            slot = region.view[index * block_bytes : (index + 1) * block_bytes]
            slot[:] = data
            self.blocks[block_id] = HeldBlock(encoded, slot, "ram")
        self.all_blocks = dict(self.blocks)
        self.blocks = dict(list(self.blocks.items())[:computed])
        self.grown = asyncio.Condition()
        self.waiting = 0
        self.pushed: dict[BlockId, bytes] = {}
        self.digests: dict[BlockId, str] = {}
        self.open_leases = 0
        self.open_reservations = 0
        self.traceparents: list[str] = []
        self.read: list[BlockId] = []
        self.notes = 0
        self.directory: BlockDirectory | None = None
        self.commit_s = commit_s
        self._hang = hang

    def show_directory(self, count: int) -> ShownDirectory:
        """List the first `count` blocks."""
        self.directory = BlockDirectory.create(len(self.region.view), EPOCH)
        assert self.directory is not None
        for block_id, block in list(self.blocks.items())[:count]:
            offset = self.region.offset_of(block.payload)
            assert offset is not None
            assert self.directory.add(block_id, offset, len(block.payload), block.header)
        return ShownDirectory(self.directory.region, self._was_read)

    def _was_read(self, request: PullRequest, duration_s: float) -> None:
        assert request.same_host
        assert duration_s >= 0
        self.read.extend(request.ids)
        self.notes += 1

    async def compute(self, count: int) -> None:
        """Have the first `count` blocks."""
        async with self.grown:
            self.blocks = dict(list(self.all_blocks.items())[:count])
            self.grown.notify_all()

    async def wait(self, block_id: BlockId, wait_s: float) -> None:
        """Until the block is here, for as long as that."""
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_s), self.grown:
                await self.grown.wait_for(lambda: block_id in self.blocks)
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1

    async def lease(self, request: PullRequest) -> Lease:
        if request.wait_s:
            await self.wait(request.ids[0], request.wait_s)
        self.traceparents.append(request.traceparent)
        if self._hang:
            await asyncio.sleep(3600)
        if request.epoch not in (0, EPOCH):
            return Lease(self, [], STOP_EPOCH)
        found: list[HeldBlock] = []
        for block_id in request.ids:
            if block_id not in self.blocks:
                break
            found.append(self.blocks[block_id])
        stop = STOP_COMPLETE if len(found) == len(request.ids) else STOP_MISSING
        if request.heads is not None:
            whole, found = found, narrowed(found, request.heads)
            stop = stop if len(found) == len(whole) else STOP_HEADS
        return Lease(self, found, stop)

    async def reserve(self, headers: Sequence[bytes], epoch: int) -> Reservation:
        return Reservation(self, headers if epoch in (0, EPOCH) else [])


class Lease:
    def __init__(self, holder: Holder, blocks: list[HeldBlock], stop: str) -> None:
        self.blocks = blocks
        self.stop = stop
        self._holder = holder
        holder.open_leases += 1

    def release(self, num_sent: int, stop: str) -> None:
        self._holder.open_leases -= 1


class Reservation:
    def __init__(self, holder: Holder, headers: Sequence[bytes]) -> None:
        self._holder = holder
        decoded = [decode_header(encoded) for encoded in headers]
        self.num_held = sum(block.block_id in holder.blocks for block in decoded)
        self._headers = decoded[self.num_held :]
        self._memory = [bytearray(block.payload_bytes) for block in self._headers]
        self.buffers = [memoryview(data) for data in self._memory]
        holder.open_reservations += 1

    async def commit(self) -> int:
        try:
            await asyncio.sleep(self._holder.commit_s)
        finally:
            self._holder.open_reservations -= 1
        for count, (block, data) in enumerate(zip(self._headers, self._memory, strict=True)):
            try:
                verify_payload(block, memoryview(data))
            except BlockInvalid:
                return self.num_held + count
            self._holder.pushed[block.block_id] = bytes(data)
            self._holder.digests[block.block_id] = blake2b(data, digest_size=16).hexdigest()
        return self.num_held + len(self._headers)

    def abandon(self) -> None:
        self._holder.open_reservations -= 1


async def serve(arguments: argparse.Namespace) -> None:
    holder = Holder(
        arguments.blocks,
        arguments.block_bytes,
        hang=arguments.hang,
        spoil=arguments.spoil,
        commit_s=arguments.commit_s,
        computed=arguments.computed,
    )
    secret = MeshSecret(arguments.secret)
    directory = holder.show_directory(arguments.listed) if arguments.listed else None
    endpoint = TransferEndpoint(
        arguments.transport, secret, holder, holder, max_operation_s=10.0, regions=[holder.region], directory=directory
    )
    server = MeshServer(f"{arguments.host}:{arguments.grpc_port}", secret=secret)
    endpoint.attach(server)
    pull_address = endpoint.listen(f"{arguments.host}:{arguments.pull_port}")
    grpc_address = await server.start()
    endpoint.listen_shm(grpc_address)
    await server.set_ready(True)
    print(json.dumps({"pull_address": pull_address, "grpc_address": grpc_address}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line.startswith(b"strike"):
            assert holder.directory is not None
            holder.directory.remove(chain(arguments.blocks)[int(line.split()[1])])
        if line.startswith(b"compute"):
            await holder.compute(int(line.split()[1]))
        print(
            json.dumps(
                {
                    "open_leases": holder.open_leases,
                    "waiting": holder.waiting,
                    "open_reservations": holder.open_reservations,
                    "pushed": [block_id.hex() for block_id in holder.pushed],
                    "notes": holder.notes,
                    "read": [block_id.hex() for block_id in holder.read],
                    "pushed_digests": list(holder.digests.values()),
                    "traceparents": holder.traceparents,
                }
            ),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", required=True)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=int, default=192 * 1024)
    parser.add_argument("--computed", type=int, help="have so many of the blocks at first; all by default")
    parser.add_argument("--listed", type=int, default=0, help="show a directory of so many blocks")
    parser.add_argument("--secret", default=SECRET)
    parser.add_argument("--hang", action="store_true", help="never answer a pull")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--grpc-port", type=int, default=0)
    parser.add_argument("--pull-port", type=int, default=0)
    parser.add_argument("--commit-s", type=float, default=0.0, help="how long keeping what was pushed takes")
    parser.add_argument("--spoil", type=int, default=-1, help="flip a bit of this block")
    configure_logging("holder", "holder", "WARNING")
    asyncio.run(serve(parser.parse_args()))
    # UCX's own teardown at interpreter exit can hang.
    os._exit(0)


if __name__ == "__main__":
    main()
