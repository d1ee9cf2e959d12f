"""`python -m bench.sim_workers --workers 200`: one router over many simulated workers of one machine.

The workers are real processes, forked from one that has imported everything, so that they share its pages and start at
once. Printed: memory of a worker, what idle workers, Valkey and the router take of the processor, and the router's
decisions over gRPC: asks of 32-block prompts at a steady rate, every grant closed again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from kvmesh.v1 import router_pb2, router_pb2_grpc

import services.worker.engine.sim  # noqa: F401 (every worker would import it by itself)
from bench.kv_node import cpu_seconds, running_valkey
from bench.load import percentile
from services.cli.ports import free_ports
from services.common.blocks import BLOCK_ID_BYTES
from services.common.models import DEFAULT_MODEL
from services.common.process import die_with_parent
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.worker.__main__ import main as run_worker

_SECRET = "a secret of one measurement"
_BLOCKS = 32
_START_TIMEOUT_S = 300.0
_ASK_TIMEOUT_S = 30.0


def fork_workers(count: int, redis_url: str, log: Path) -> list[int]:
    """Process ids of `count` workers, which die with this process. Call before gRPC is used here."""
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    return [_fork(number, redis_url, log, parent) for number in range(count)]


def _fork(number: int, redis_url: str, log: Path, parent: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        status = run_worker(("--engine", "sim", "--instance", f"w{number}", "--redis-url", redis_url))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@contextmanager
def mesh(count: int, folder: Path) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Valkey, workers and a router: its address, and process ids by kind. Everything is ended afterwards."""
    address = f"127.0.0.1:{next(free_ports())}"
    os.environ |= {"KVMESH_MESH_SECRET": _SECRET, "KVMESH_LOG_LEVEL": "WARNING"}
    with ExitStack() as stack:
        valkey_pid, url = stack.enter_context(running_valkey(folder))
        workers = fork_workers(count, url, folder / "workers.log")
        stack.callback(_end_all, workers)
        router = subprocess.Popen([sys.executable, "-m", "services.router", "--listen", address, "--redis-url", url])
        stack.callback(router.wait)
        stack.callback(router.kill)
        yield address, {"valkey": [valkey_pid], "router": [router.pid], "workers": workers}


def _end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def measure(address: str, pids: dict[str, list[int]], rate: float, seconds: float) -> None:
    """Wait until the router knows every worker, then print idle and asking figures."""
    channel = open_channel(address)
    # The stubs are typed for blocking calls.
    stub: Any = router_pb2_grpc.RouterStub(channel)
    metadata = call_metadata(MeshSecret(_SECRET))
    count, started_s = len(pids["workers"]), time.perf_counter()
    async with asyncio.timeout(_START_TIMEOUT_S):
        await channel.channel_ready()
        while await _ready(stub, metadata) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    print(f"{count} workers ready after {time.perf_counter() - started_s:.1f} s; {_memory(pids['workers'])}")
    before, wall_s = _cpu(pids), time.perf_counter()
    await asyncio.sleep(seconds)
    _print_cpu("idle", pids, before, time.perf_counter() - wall_s)
    before, wall_s = _cpu(pids), time.perf_counter()
    times_ms = sorted([1e3 * took async for took in _asks(stub, metadata, rate, seconds)])
    _print_cpu(f"{rate:g} asks/s", pids, before, time.perf_counter() - wall_s)
    shown = ", ".join(f"p{100 * share:g} {percentile(times_ms, share):.2f} ms" for share in (0.5, 0.99))
    print(f"decisions over gRPC, {_BLOCKS}-block prompts: {shown} of {len(times_ms)}")
    print(f"suspect at the end: {count - await _ready(stub, metadata)} of {count}")
    await channel.close(None)


async def _ready(stub: Any, metadata: tuple[tuple[str, str], ...]) -> int:
    try:
        known = await stub.Describe(router_pb2.DescribeRequest(), metadata=metadata, timeout=_ASK_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        # While hundreds of processes start a router may have no time to answer; who waits has a deadline.
        print(f"the router does not answer: {error.code().name}", file=sys.stderr)
        return 0
    return sum(worker.ready and not worker.suspect for worker in known.workers)


async def _asks(stub: Any, metadata: tuple[tuple[str, str], ...], rate: float, seconds: float) -> AsyncIterator[float]:
    """Seconds from an ask to its grant, one after the other at the rate of an open loop as long as they keep up."""
    models = stub.WatchModels(router_pb2.WatchModelsRequest(), metadata=metadata)
    model = next(one for one in (await models.read()).models if one.name == DEFAULT_MODEL)
    models.cancel()
    stream = stub.Route(metadata=metadata)
    began_s = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(began_s + number / rate - time.perf_counter())
        name, blocks = f"r{number}", os.urandom(_BLOCKS * BLOCK_ID_BYTES)
        ask = router_pb2.Ask(
            request_id=name,
            attempt=1,
            model=model.name,
            model_digest=model.digest,
            block_ids=blocks,
            prompt_tokens=16 * _BLOCKS + 1,
            max_output_tokens=64,
            num_choices=1,
        )
        asked_s = time.perf_counter()
        await stream.write(router_pb2.RouteRequest(ask=ask))
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            answer = await stream.read()
        took_s = time.perf_counter() - asked_s
        if not isinstance(answer, router_pb2.RouteResponse) or not answer.HasField("grant"):
            raise RuntimeError(f"no grant: {answer}")
        done = router_pb2.Done(request_id=name, attempt=1, outcome=router_pb2.OUTCOME_CANCELLED)
        await stream.write(router_pb2.RouteRequest(done=done))
        yield took_s
    stream.cancel()


def _memory(pids: Sequence[int]) -> str:
    """Mean resident memory of a process, and its share where pages that several have count in parts."""
    found = [_rollup(pid) for pid in pids]
    mean = {name: sum(one[name] for one in found) / len(found) / 1024 for name in ("Rss", "Pss", "Private_Dirty")}
    return f"a worker: {mean['Rss']:.0f} MB resident, {mean['Private_Dirty']:.0f} its own, {mean['Pss']:.0f} by share"


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _cpu(pids: dict[str, list[int]]) -> dict[str, float]:
    return {kind: sum(cpu_seconds(pid) for pid in some) for kind, some in pids.items()}


def _print_cpu(name: str, pids: dict[str, list[int]], before: dict[str, float], wall_s: float) -> None:
    now = _cpu(pids)
    shares = ", ".join(f"{kind} {(now[kind] - before[kind]) / wall_s:.2f} cores" for kind in pids)
    each = (now["workers"] - before["workers"]) / wall_s / len(pids["workers"])
    print(f"{name}: {shares} ({each:.2%} of a core each worker)")


def main(argv: Sequence[str] | None = None) -> int:
    """Fork, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--rate", type=float, default=100.0, help="asks a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idling, and of asking")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder, mesh(arguments.workers, Path(folder)) as (address, pids):
        try:
            asyncio.run(measure(address, pids, arguments.rate, arguments.seconds))
        finally:
            sys.stderr.write((Path(folder) / "workers.log").read_text()[-2000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
