"""Real kvstore nodes for the benches of the KV tier: a Valkey, node processes, and blocks pushed into them.

Nodes are configured by their environment, as a deployment does it, and log to a file. Every payload is different and
every header carries its checksums, so that whoever pulls a block can tell whether it is the one that was pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kvmesh.v1 import kvstore_pb2, kvstore_pb2_grpc

from services.cli.binaries import valkey_binary
from services.common.blocks import BlockId, chain_block_ids
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.transfer.header import NO_OWNER, UNKNOWN_PARENT, BlockFormat, Segment, make_header
from services.common.transfer.protocol import PeerAddress, PushRequest, Transport
from services.common.transfer.shm_client import ShmTransport
from services.common.transfer.shm_regions import create_region

SECRET_TEXT = "a secret for measuring"
SECRET = MeshSecret(SECRET_TEXT)
INSTANCE = "kv-bench"
NUM_KV_HEADS = 8
# Of the default model: layers, keys and values, KV heads, tokens, head dimension, bytes of a bfloat16.
DEFAULT_BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 2
_OFFER_BYTES = 32 * 2**20
_MAX_OFFER_BLOCKS = 32
_START_DEADLINE_S = 120.0
_CALL_DEADLINE_S = 30.0
_POLL_S = 0.002
_KEY = bytes(32)
_SERVICE_PREFIXES = ("KVMESH_", "OTEL_", "REDIS_")


def block_format(block_bytes: int) -> BlockFormat:
    """Blocks of a model with 8 KV heads, each with its checksum."""
    segment = Segment(0, 1, (NUM_KV_HEADS, block_bytes // NUM_KV_HEADS // 2), "bfloat16")
    return BlockFormat(b"m" * 16, "bfloat16", NUM_KV_HEADS, block_bytes, (segment,))


def chain(number: int, num_blocks: int) -> list[BlockId]:
    """Ids of a prompt's blocks; prompts of different numbers share none."""
    return chain_block_ids(_KEY, BlockId(number.to_bytes(16, "little")), np.arange(16 * num_blocks, dtype=np.uint32))


@contextlib.contextmanager
def running_valkey(folder: Path) -> Iterator[tuple[int, str]]:
    """A Valkey without persistence: its pid and its URL. The folder's name is short: sockets are limited to 100."""
    path = folder / "valkey.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen([valkey_binary(), *options, "--logfile", str(folder / "valkey.log")]) as process:
        try:
            _wait_until(lambda: _accepts(path), process, "valkey")
            yield process.pid, f"unix://{path}"
        finally:
            process.kill()


class Node:
    """A kvstore process. `settings` are those of its settings class."""

    def __init__(self, folder: Path, redis_url: str, **settings: object) -> None:
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        given = {"instance": INSTANCE, "redis_url": redis_url, "mesh_secret": SECRET_TEXT, "ready_file": ready}
        values = {f"KVMESH_KVSTORE_{name.upper()}": str(value) for name, value in {**given, **settings}.items()}
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_SERVICE_PREFIXES)}
        self.log_path = folder / "node.log"
        self.started_s = time.perf_counter()
        with self.log_path.open("ab") as log:
            command = [sys.executable, "-m", "services.kvstore"]
            self._process = subprocess.Popen(command, env=environment | values, stderr=log)
        try:
            _wait_until(ready.exists, self._process, "the node")
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.perf_counter()
        self.addresses: dict[str, Any] = json.loads(ready.read_text())
        self.peer = PeerAddress(self.addresses["pull_address"], self.addresses["address"])

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM, and wait."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.wait(10)

    def logged(self, event: str) -> dict[str, Any]:
        """The last line that it has logged for an event."""
        whole, _, _ = self.log_path.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        found: dict[str, Any] = [line for line in lines if line["event"] == event][-1]
        return found


@contextlib.contextmanager
def running_node(folder: Path, redis_url: str, **settings: object) -> Iterator[Node]:
    """A node that ends with the body."""
    folder.mkdir(exist_ok=True)
    node = Node(folder, redis_url, **settings)
    try:
        yield node
    finally:
        node.kill()


def drop_from_page_cache(folder: Path) -> None:
    """Of every file in a folder. Raises RuntimeError when some of it is still there."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached := _cached_pages(file.fileno()):
                raise RuntimeError(f"{path.name}: {cached} pages are still in the page cache")


def _cached_pages(fd: int) -> int:
    size = os.fstat(fd).st_size
    if not size:
        return 0
    with mmap.mmap(fd, size, access=mmap.ACCESS_COPY) as memory:
        resident = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        start = ctypes.c_char.from_buffer(memory)
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), resident):
            raise OSError(ctypes.get_errno(), "mincore")
        del start
    return sum(page & 1 for page in resident.raw)


def read_bytes_of(pid: int) -> int:
    """Bytes that a process (0: this one) has had fetched from block devices."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid or os.getpid()}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process: its clock's id is made of its pid (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


class NodeClient:
    """Statistics and clearing of a node. Close it."""

    def __init__(self, node: Node) -> None:
        self._channel = open_channel(node.addresses["address"])
        self._stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._metadata = call_metadata(SECRET)

    async def stats(self) -> kvstore_pb2.StatsResponse:
        """What it holds and has done."""
        request = kvstore_pb2.StatsRequest()
        response = await self._stub.Stats(request, metadata=self._metadata, timeout=_CALL_DEADLINE_S)
        assert isinstance(response, kvstore_pb2.StatsResponse)
        return response

    async def clear(self, owner: bytes) -> int:
        """Begin a generation of an owner's tenant. Returns how many older blocks in RAM went."""
        request = kvstore_pb2.ClearRequest(owner_digest=owner)
        response = await self._stub.Clear(request, metadata=self._metadata, timeout=_CALL_DEADLINE_S)
        return int(response.ram_blocks)

    async def written(self, max_queued_bytes: int, block_bytes: int) -> None:
        """Wait until no more than this much waits for the SSD."""
        async with asyncio.timeout(_CALL_DEADLINE_S):
            while True:
                if (await self.stats()).ssd.queued_blocks * block_bytes <= max_queued_bytes:
                    return
                await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chain and whose it is."""

    ids: Sequence[BlockId]
    owner: bytes = NO_OWNER


class Pusher:
    """Pushes made-up blocks over shared memory. Close it."""

    def __init__(self) -> None:
        region = create_region("kvmesh-bench", _OFFER_BYTES)
        if region is None:
            raise RuntimeError("shared memory files need Linux")
        self._memory = region.view
        self._memory[:] = np.random.default_rng(0).bytes(_OFFER_BYTES)
        self._transport: Transport = ShmTransport(SECRET.pull_key, [region])
        self._count = 0

    async def push(self, node: Node, block_bytes: int, prompt: Prompt) -> int:
        """Offer a whole chain, some blocks at a time; how many leading blocks the node holds then."""
        step = min(_MAX_OFFER_BLOCKS, _OFFER_BYTES // block_bytes)
        for first in range(0, len(prompt.ids), step):
            count = min(step, len(prompt.ids) - first)
            offer = self._offer(block_bytes, prompt, first, count)
            accepted = (await self._transport.push(node.peer, offer)).accepted
            if accepted < count:
                return first + accepted
        return len(prompt.ids)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _offer(self, block_bytes: int, prompt: Prompt, first: int, count: int) -> PushRequest:
        headers, payloads = [], []
        for index in range(first, first + count):
            payload = self._memory[(index - first) * block_bytes : (index - first + 1) * block_bytes]
            self._count += 1
            payload[:8] = self._count.to_bytes(8, "little")
            payloads.append(payload)
            headers.append(
                make_header(
                    block_format(block_bytes),
                    prompt.ids[index],
                    payload,
                    parent_id=prompt.ids[index - 1] if index else UNKNOWN_PARENT,
                    owner_digest=prompt.owner,
                    starts_chain=index == 0,
                )
            )
        return PushRequest(headers, payloads, 0, _CALL_DEADLINE_S)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
        client.settimeout(1.0)
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        return client.recv(16).startswith(b"+PONG")
    return False


def _wait_until(holds: Any, process: subprocess.Popen[bytes], what: str) -> None:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while not holds():
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise RuntimeError(f"{what} did not start")
        time.sleep(_POLL_S)
