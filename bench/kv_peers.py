"""How fast other systems bring the blocks of `bench.kv` from one process of this host to another.

`python bench/kv_peers.py NAME TASK`, run by an interpreter that has the system; nothing here imports the mesh. TASK is
JSON: cells (block bytes, blocks at once), rounds, seconds. A second process holds the memory, as a node does. Prints
rows as JSON. Each system is called as its own clients call it for one-sided reads or gets, and verifies nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

_TUNED_TCP = {
    "UCX_TLS": "tcp",
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "LMCACHE_TRACK_USAGE": "false", "MC_LOG_LEVEL": "ERROR"}
# What each is given beside this process's environment.
ENVIRONMENTS = {
    "ucxx tcp": _QUIET | _TUNED_TCP,
    "ucxx shm": _QUIET | {"UCX_TLS": "posix,sysv,self"},
    "ucxx cma": _QUIET | {"UCX_TLS": "posix,sysv,cma,self"},
    "mooncake tcp": _QUIET | {"MC_FORCE_TCP": "1"},
    "lmcache get": _QUIET,
    "nixl tcp": _QUIET | {"UCX_TLS": "tcp"},
    "nixl cma": _QUIET | {"UCX_TLS": "cma,tcp"},
}
# Those that the mesh itself depends on, measured bare.
OURS = ("ucxx tcp", "ucxx shm", "ucxx cma")
# What is walked round: three times the last cache of common processors at the smallest size of blocks.
_WALK_BYTES, _MIN_BLOCKS = 96 * 2**20, 48
MIN_CALLS = 3
# Reads blocks from these offsets of the holder's memory into the same offsets of ours, and returns when they are in.
Read = Callable[[Sequence[int], int], None]


class Memory:
    """Touched and page-aligned."""

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, num_bytes))
        self.view[:] = bytes(range(256)) * (num_bytes // 256)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


class Holder:
    """The other process; lines of JSON go both ways."""

    def __init__(self, name: str, num_bytes: int) -> None:
        command = [sys.executable, __file__, name, "--hold", str(num_bytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.shown = self.receive()

    def receive(self) -> Any:
        """What the holder says next."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                return json.loads(line)
        raise RuntimeError("the holder has ended")

    def send(self, **values: Any) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")
        self.process.stdin.flush()


class Peer(Protocol):
    """A system."""

    def hold(self, memory: Memory) -> None:
        """Serve `memory` until stdin closes."""

    def connect(self, holder: Holder, memory: Memory, sizes: Sequence[int]) -> Read:
        """The way to read from the holder's memory."""


def say(**values: Any) -> None:
    """To the reading process."""
    print(json.dumps(values), flush=True)


class Ucxx:
    """Bare ucxx, both ends spinning. Shared memory needs worker addresses and no error handling."""

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched

    def _start(self) -> None:
        ucxx = importlib.import_module("ucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._api, self._tag = ucxx.libucxx, ucxx.types.Tag
        self._context = self._api.UCXContext()
        self._worker = self._api.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)

    def _endpoint(self, address: str) -> Any:
        found = self._api.UCXAddress.create_from_buffer(bytes.fromhex(address))
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, found, self._watched)

    def _own_address(self) -> str:
        return bytes(self._worker.address.tobytes()).hex()

    def _finish(self, requests: Sequence[Any]) -> None:
        for request in requests:
            while not request.completed:
                self._worker.progress()
            request.check_error()

    def hold(self, memory: Memory) -> None:
        """As `Peer.hold`; asks arrive under tag 1."""
        self._start()
        say(address=self._own_address())
        peer = self._endpoint(json.loads(sys.stdin.readline())["address"])
        say(connected=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        ask = memoryview(bytearray(24)).cast("Q")
        while True:
            self._finish([self._worker.tag_recv(self._array(ask), self._tag(1))])
            first, count, size = ask
            blocks = [memory.view[i * size : (i + 1) * size] for i in range(first, first + count)]
            self._finish([peer.tag_send(self._array(block), self._tag(2 + i)) for i, block in enumerate(blocks)])

    def connect(self, holder: Holder, memory: Memory, sizes: Sequence[int]) -> Read:
        """As `Peer.connect`."""
        self._start()
        peer = self._endpoint(holder.shown["address"])
        holder.send(address=self._own_address())
        holder.receive()

        def read(offsets: Sequence[int], size: int) -> None:
            arrays = [self._array(memory.view[offset : offset + size]) for offset in offsets]
            requests = [self._worker.tag_recv(array, self._tag(2 + i)) for i, array in enumerate(arrays)]
            ask = memoryview(bytearray(24)).cast("Q")
            ask[0], ask[1], ask[2] = offsets[0] // size, len(offsets), size
            self._finish([peer.tag_send(self._array(ask), self._tag(1)), *requests])

        return read


class Mooncake:
    """The transfer engine: a batch of one-sided reads."""

    def _start(self, memory: Memory) -> Any:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
        if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        if engine.register_memory(memory.address, len(memory.view)):
            raise RuntimeError("the engine does not take the memory")
        return engine

    def hold(self, memory: Memory) -> None:
        """As `Peer.hold`."""
        engine = self._start(memory)
        say(session=f"127.0.0.1:{engine.get_rpc_port()}", address=memory.address)
        sys.stdin.read()

    def connect(self, holder: Holder, memory: Memory, sizes: Sequence[int]) -> Read:
        """As `Peer.connect`."""
        engine = self._start(memory)
        session, base = holder.shown["session"], holder.shown["address"]

        def read(offsets: Sequence[int], size: int) -> None:
            ours, theirs = [memory.address + at for at in offsets], [base + at for at in offsets]
            if engine.batch_transfer_sync_read(session, ours, theirs, [size] * len(offsets)):
                raise RuntimeError("a read failed")

        return read


class Nixl:
    """A prepared list of blocks on both sides, and a transfer of some of them, as inference engines do."""

    def _start(self, name: str, memory: Memory, *, progresses: bool) -> Any:
        api = importlib.import_module("nixl_cu12._api")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=progresses, backends=["UCX"]))
        agent.register_memory([(memory.address, len(memory.view), 0, "")], "DRAM")
        return agent

    def hold(self, memory: Memory) -> None:
        """As `Peer.hold`."""
        agent = self._start("holder", memory, progresses=True)
        say(metadata=agent.get_agent_metadata().hex(), address=memory.address)
        sys.stdin.read()

    def connect(self, holder: Holder, memory: Memory, sizes: Sequence[int]) -> Read:
        """As `Peer.connect`."""
        # It asks for the state of its reads all the time, and a second thread would take a core from the holder.
        agent = self._start("puller", memory, progresses=False)
        remote = agent.add_remote_agent(bytes.fromhex(holder.shown["metadata"]))
        name = remote.decode() if isinstance(remote, bytes) else remote

        def prepared(base: int, whose: str, size: int) -> Any:
            places = [(base + at, size, 0) for at in range(0, len(memory.view) - size + 1, size)]
            return agent.prep_xfer_dlist(whose, places, "DRAM")

        lists = {
            size: (prepared(memory.address, "", size), prepared(holder.shown["address"], name, size)) for size in sizes
        }

        def read(offsets: Sequence[int], size: int) -> None:
            indices = [offset // size for offset in offsets]
            ours, theirs = lists[size]
            transfer = agent.make_prepped_xfer("READ", ours, indices, theirs, indices)
            state = agent.transfer(transfer)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            agent.release_xfer_handle(transfer)
            if state != "DONE":
                raise RuntimeError(f"a read ended as {state}")

        return read


class LmCache:
    """LMCache's server; its client asks for one key after another, so `in flight` is one here whatever the cell."""

    def hold(self, memory: Memory) -> None:
        """As `Peer.hold`."""
        server = importlib.import_module("lmcache.v1.server.__main__").LMCacheServer("127.0.0.1", 0, "cpu")
        say(port=server.server_socket.getsockname()[1])
        threading.Thread(target=server.run, daemon=True).start()
        sys.stdin.read()

    def connect(self, holder: Holder, memory: Memory, sizes: Sequence[int]) -> Read:
        """As `Peer.connect`; puts every block first. The calls on the socket are those of LMCache's connector."""
        wire, torch = importlib.import_module("lmcache.v1.protocol"), importlib.import_module("torch")
        key_type = importlib.import_module("lmcache.utils").CacheEngineKey
        kind = importlib.import_module("lmcache.v1.memory_management").MemoryFormat(1)
        client = importlib.import_module("socket").create_connection(("127.0.0.1", holder.shown["port"]))

        def message(command: Any, offset: int, size: int, length: int) -> bytes:
            key = key_type("model", 1, 0, offset << 32 | size, torch.float16)
            shape = torch.Size([length // 2, 1, 1, 1])
            encoded: bytes = wire.ClientMetaMessage(command, key, length, kind, torch.float16, shape).serialize()
            return encoded

        for size in sizes:
            for offset in range(0, walked_blocks(size) * size, size):
                client.sendall(message(wire.ClientCommand.PUT, offset, size, size))
                client.sendall(memory.view[offset : offset + size])

        def read(offsets: Sequence[int], size: int) -> None:
            for offset in offsets:
                client.sendall(message(wire.ClientCommand.GET, offset, size, 0))
                reply = wire.ServerMetaMessage.deserialize(client.recv(wire.ServerMetaMessage.packlength()))
                if reply.length != size:
                    raise RuntimeError("a get failed")
                taken = 0
                while taken < size:
                    taken += client.recv_into(memory.view[offset + taken : offset + size], size - taken)

        return read


def walked_blocks(size: int) -> int:
    """How many blocks of a size a path in RAM walks round; those of the mesh's own paths too."""
    return max(_MIN_BLOCKS, _WALK_BYTES // size)


def calls(block_bytes: int, count: int) -> Iterator[list[int]]:
    """Offsets of one call after the other."""
    for first in itertools.cycle(range(0, walked_blocks(block_bytes) - count + 1, count)):
        yield [(first + i) * block_bytes for i in range(count)]


def measure(read: Read, holder_pid: int, task: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Cells take turns, round by round, as in `bench.kv`."""
    cells = [(int(size), int(count)) for size, count in task["cells"]]
    offsets = {cell: calls(*cell) for cell in cells}
    rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    costs: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    times: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for cell in cells:
        read(next(offsets[cell]), cell[0])
    for cell in [cell for _ in range(task["rounds"]) for cell in cells]:
        cpu_s = time.process_time() + time.clock_gettime(~holder_pid << 3 | 2)
        started_s = before_s = time.perf_counter()
        count = 0
        while before_s < started_s + task["seconds"] or count < MIN_CALLS:
            read(next(offsets[cell]), cell[0])
            after_s = time.perf_counter()
            times[cell].append((after_s - before_s) * 1e6)
            before_s = after_s
            count += 1
        gigabytes = count * cell[0] * cell[1] / 1e9
        rates[cell].append(gigabytes / (before_s - started_s))
        cpu_s = time.process_time() + time.clock_gettime(~holder_pid << 3 | 2) - cpu_s
        costs[cell].append(cpu_s / gigabytes)
    for cell in cells:
        ordered = sorted(times[cell])
        yield {
            "block_bytes": cell[0],
            "tier": "ram",
            "transport": name,
            "same_host": True,
            "in_flight": cell[1],
            "verified": False,
            "ceiling": False,
            "gb_per_s": round(statistics.median(rates[cell]), 3),
            "p50_us": round(ordered[len(ordered) // 2], 1),
            "p99_us": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
            "cpu_s_per_gb": round(statistics.median(costs[cell]), 3),
        }


def peer_of(name: str) -> Peer:
    """The system of a name in ENVIRONMENTS."""
    system, _, kind = name.partition(" ")
    if system == "ucxx":
        return Ucxx(watched=kind == "tcp")
    others: dict[str, Callable[[], Peer]] = {"mooncake": Mooncake, "nixl": Nixl, "lmcache": LmCache}
    return others[system]()


def main() -> None:
    """Hold, or measure and print."""
    name = sys.argv[1]
    if sys.argv[2] == "--hold":
        peer_of(name).hold(Memory(int(sys.argv[3])))
        os._exit(0)
    task = json.loads(sys.argv[2])
    sizes = list(dict.fromkeys(int(size) for size, _ in task["cells"]))
    num_bytes = max(walked_blocks(size) * size for size in sizes)
    holder, memory = Holder(name, num_bytes), Memory(num_bytes)
    try:
        read = peer_of(name).connect(holder, memory, sizes)
        rows = list(measure(read, holder.process.pid, task, name))
    finally:
        holder.process.kill()
    print(json.dumps(rows), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
