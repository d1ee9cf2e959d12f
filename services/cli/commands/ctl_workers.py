"""`kvmesh ctl memory | load | unload`: one worker's memory, and which model it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import grpc.aio
import typer
from kvmesh.v1 import worker_control_pb2 as pb
from kvmesh.v1 import worker_control_pb2_grpc

from services.cli.commands.arguments import StateOption, state_dir
from services.cli.commands.ctl import JsonOption, SecretOption, local_addresses, mesh_secret, row, show_rows
from services.cli.errors import CliError
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret

_TIMEOUT_S = 5.0
_POLL_S = 0.25
T = TypeVar("T")
WorkerArgument = Annotated[
    str, typer.Argument(help="Worker: its name in `kvmesh ps`, or HOST:PORT of one that was started by hand.")
]
WaitOption = Annotated[float, typer.Option(min=0, help="Longest wait for the end, seconds; 0: do not wait.")]


def memory(
    worker: Annotated[str, typer.Argument(help="Worker: name or HOST:PORT; default: all of the local mesh.")] = "",
    secret_file: SecretOption = None,
    as_json: JsonOption = False,
    state: StateOption = None,
) -> None:
    """Where workers' memory goes: weights, reserve, adapters, KV cache, largest context, resident bytes by process."""
    secret = mesh_secret(secret_file, state)
    addresses = [_address(worker, state)] if worker else local_addresses("worker", state)
    if not addresses:
        raise CliError("the mesh has no worker")
    statuses = [_with_worker(address, secret, _Control.status) for address in addresses]
    if as_json:
        show_rows([row(status) for status in statuses], as_json)
    else:
        typer.echo("\n\n".join("\n".join(_memory_lines(status)) for status in statuses))


def load(
    worker: WorkerArgument,
    model: Annotated[str, typer.Argument(help="A known name, PATH or NAME=PATH on the worker's machine.")],
    wait_s: WaitOption = 1800.0,
    secret_file: SecretOption = None,
    state: StateOption = None,
) -> None:
    """Have a worker that has no model load one; exit status 1 when that fails: the worker stays, without a model."""

    async def work(control: _Control) -> pb.WorkerStatus:
        await control.load(model)
        return await control.settled(pb.WORKER_PHASE_READY, wait_s)

    _report(_with_worker(_address(worker, state), mesh_secret(secret_file, state), work))


def unload(
    worker: WorkerArgument, wait_s: WaitOption = 120.0, secret_file: SecretOption = None, state: StateOption = None
) -> None:
    """Have a worker drain and give its model up; its memory is free then."""

    async def work(control: _Control) -> pb.WorkerStatus:
        await control.unload()
        return await control.settled(pb.WORKER_PHASE_IDLE, wait_s)

    _report(_with_worker(_address(worker, state), mesh_secret(secret_file, state), work))


class _Control:
    """Calls to one worker."""

    def __init__(self, channel: grpc.aio.Channel, secret: MeshSecret) -> None:
        self._stub = worker_control_pb2_grpc.WorkerControlStub(channel)
        self._metadata = call_metadata(secret)

    async def status(self) -> pb.WorkerStatus:
        return await self._stub.Status(pb.WorkerStatusRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)

    async def load(self, model: str) -> None:
        await self._stub.LoadModel(pb.LoadModelRequest(model=model), timeout=_TIMEOUT_S, metadata=self._metadata)

    async def unload(self) -> None:
        await self._stub.UnloadModel(pb.UnloadModelRequest(), timeout=_TIMEOUT_S, metadata=self._metadata)

    async def settled(self, phase: pb.WorkerPhase.ValueType, wait_s: float) -> pb.WorkerStatus:
        """The status once the worker is in the phase, or idle with an error; as it is at the end of the wait."""
        deadline_s = time.monotonic() + wait_s
        told = ""
        while True:
            status = await self.status()
            if status.phase == phase or status.error or time.monotonic() >= deadline_s:
                return status
            line = _progress_line(status)
            if line != told:
                typer.echo(line, err=True)
                told = line
            await asyncio.sleep(_POLL_S)


def _with_worker(address: str, secret: MeshSecret, work: Callable[[_Control], Awaitable[T]]) -> T:
    async def run() -> T:
        async with open_channel(address) as channel:
            return await work(_Control(channel, secret))

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        raise CliError(f"worker {address}: {error.code().name}: {error.details()}") from None


def _address(worker: str, state: Path | None) -> str:
    if ":" in worker:
        return worker
    processes = state_dir(state).snapshot()["processes"]
    found = [str(one["address"]) for one in processes if one["kind"] == "worker" and one["name"] == worker]
    if not found:
        raise CliError(f"`kvmesh up` started no worker {worker!r}; one that was started by hand goes by HOST:PORT")
    return found[0]


def _phase(status: pb.WorkerStatus) -> str:
    return pb.WorkerPhase.Name(status.phase).removeprefix("WORKER_PHASE_").lower()


def _progress_line(status: pb.WorkerStatus) -> str:
    """In tens of per cent, so that a line is worth its place."""
    tenth = 10 * status.done_bytes // status.total_bytes * 10 if status.total_bytes else 0
    return f"{status.worker_id}: {_phase(status)} {status.model}{f' {tenth} %' if tenth else ''}"


def _report(status: pb.WorkerStatus) -> None:
    if status.error:
        typer.echo(f"{status.worker_id}: {_phase(status)}: {status.error}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{status.worker_id}: {_phase(status)}{f' ({status.model})' if status.model else ''}")


def _memory_lines(status: pb.WorkerStatus) -> list[str]:
    """The map for a person."""
    lines = [f"{status.worker_id}: {_phase(status)}{f', {status.model}' if status.model else ''}"]
    if status.error:
        lines.append(f"  last load failed: {status.error}")
    if status.HasField("memory"):
        memory = status.memory
        parts = (
            ("weights", memory.weight_bytes, status.weight_format),
            ("reserve for a step", memory.reserve_bytes, ""),
            ("adapters", memory.adapter_bytes, "at most"),
            ("KV cache", memory.kv_bytes, f"{memory.num_blocks} blocks of {memory.block_bytes} bytes"),
            ("staging", memory.staging_bytes, "host memory"),
            ("left", memory.unused_bytes, f"of {memory.total_bytes} on {memory.device}"),
        )
        lines += [f"  {name:<20} {size:>16}  {note}".rstrip() for name, size, note in parts]
        lines.append(f"  {'KV cache holds':<20} {memory.kv_tokens:>16}  tokens")
        note = f"tokens, prompt and output together; the model is served with {memory.max_context}"
        lines.append(f"  {'largest context':<20} {memory.largest_context:>16}  {note}")
    for process in status.processes:
        note = f"pid {process.pid}, and {process.shared_bytes} of shared memory"
        lines.append(f"  {f'resident, {process.role}':<20} {process.private_bytes:>16}  {note}")
    return lines
