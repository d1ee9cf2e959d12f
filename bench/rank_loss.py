"""`python -m bench.rank_loss`: how soon a replica is withdrawn when one of its ranks is killed or stopped.

A mesh with one worker of two ranks and a tiny model; its Watch stream is read as a router does. From a signal to rank 1
until a router suspects the worker: when the stream breaks, or a second after the latest word of the quietest process,
of which the last report told the age. Between rounds the supervisor starts the worker again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from kvmesh.v1 import worker_pb2, worker_pb2_grpc

from bench.local_mesh import LocalMesh, local_mesh
from bench.tiny_model import write_tiny_model
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.router.roll_call import SUSPECT_S

_RANK = "worker-0/rank1"
_READY_TIMEOUT_S, _REPORTS = 300.0, 4
# Much longer than a report is late.
_SILENCE_S = 3.0


async def suspected_s(mesh: LocalMesh, number: signal.Signals) -> float:
    """Seconds from the signal until the Watch stream breaks, or until the silence is as long as routers bear."""
    entry = next(one for one in mesh.processes if one["kind"] == "worker")
    secret = MeshSecret((mesh.folder / "mesh_secret").read_text().strip())
    async with open_channel(entry["address"]) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(), metadata=call_metadata(secret))
        for _ in range(_REPORTS):
            await call.read()
        os.kill(mesh.pids()[_RANK], number)
        began_s = heard_s = time.perf_counter()
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    report = await call.read()
                if not isinstance(report, worker_pb2.WorkerReport):
                    return time.perf_counter() - began_s
                heard_s = time.perf_counter() - report.silent_s
        except grpc.aio.AioRpcError:
            return time.perf_counter() - began_s
        except TimeoutError:
            call.cancel()
            return heard_s + SUSPECT_S - began_s


def wait_ready(mesh: LocalMesh, before: int) -> None:
    """Until the worker has another rank 1. Raises TimeoutError."""
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        mesh.processes = json.loads(mesh.kvmesh("ps", "--json"))
        if all(one["ready"] for one in mesh.processes) and mesh.pids().get(_RANK, before) != before:
            return
        time.sleep(0.2)
    raise TimeoutError("the worker was not started again")


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        flags = ("--kvstores", "0", "--model", f"tiny={model}", "--tensor-parallel", "2", "--threads", "2")
        with local_mesh(*flags) as mesh:
            for number in (signal.SIGKILL, signal.SIGSTOP):
                took = []
                for _ in range(arguments.rounds):
                    before = mesh.pids()[_RANK]
                    took.append(asyncio.run(suspected_s(mesh, number)))
                    wait_ready(mesh, before)
                print(f"{number.name}: {', '.join(f'{one * 1000:.0f}' for one in sorted(took))} ms", flush=True)


if __name__ == "__main__":
    main()
