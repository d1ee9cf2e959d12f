"""The WorkerControl service: what the slot does, where memory goes, and telling it to load or unload."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import grpc
import grpc.aio
from kvmesh.v1 import worker_control_pb2 as pb
from kvmesh.v1 import worker_control_pb2_grpc

from services.common.models import resolve_model
from services.common.settings import ConfigurationError
from services.worker.errors import Refused
from services.worker.replica import Replica
from services.worker.slot import ModelSlot, Phase

_PHASES = {
    Phase.IDLE: pb.WORKER_PHASE_IDLE,
    Phase.COPYING: pb.WORKER_PHASE_COPYING,
    Phase.LOADING: pb.WORKER_PHASE_LOADING,
    Phase.READY: pb.WORKER_PHASE_READY,
    Phase.DRAINING: pb.WORKER_PHASE_DRAINING,
}
_StatusContext = grpc.aio.ServicerContext[pb.WorkerStatusRequest, pb.WorkerStatus]
_LoadContext = grpc.aio.ServicerContext[pb.LoadModelRequest, pb.LoadModelResponse]
_UnloadContext = grpc.aio.ServicerContext[pb.UnloadModelRequest, pb.UnloadModelResponse]


class ControlService(worker_control_pb2_grpc.WorkerControlServicer):
    """Status, LoadModel and UnloadModel of one slot."""

    def __init__(self, slot: ModelSlot, worker_id: str) -> None:
        self._slot = slot
        self._worker_id = worker_id

    async def Status(self, request: pb.WorkerStatusRequest, context: _StatusContext) -> pb.WorkerStatus:
        """See the protocol."""
        slot = self._slot
        status = pb.WorkerStatus(
            worker_id=self._worker_id,
            phase=_PHASES[slot.phase],
            model=slot.model,
            error=slot.error,
            done_bytes=slot.log.done_bytes,
            total_bytes=slot.log.total_bytes,
            processes=_processes(slot.replica),
        )
        if slot.replica is not None:
            memory = slot.replica.engine_ready.memory
            status.weight_format = slot.replica.engine_ready.weight_format
            status.memory.CopyFrom(pb.MemoryMap(**{name: getattr(memory, name) for name in memory.__struct_fields__}))
        return status

    async def LoadModel(self, request: pb.LoadModelRequest, context: _LoadContext) -> pb.LoadModelResponse:
        """See the protocol."""
        try:
            self._slot.load(await asyncio.to_thread(resolve_model, request.model))
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as refusal:
            await context.abort(grpc.StatusCode[refusal.code], refusal.detail)
        return pb.LoadModelResponse()

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: _UnloadContext) -> pb.UnloadModelResponse:
        """See the protocol."""
        try:
            self._slot.unload()
        except Refused as refusal:
            await context.abort(grpc.StatusCode[refusal.code], refusal.detail)
        return pb.UnloadModelResponse()


def _processes(replica: Replica | None) -> list[pb.ProcessMemory]:
    """Resident memory of the front and its children; one that is just ending is left out."""
    pids = {"front": os.getpid()}
    if replica is not None:
        pids |= replica.child_pids
    found = []
    for role, pid in pids.items():
        with contextlib.suppress(OSError, KeyError, ValueError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            private, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
            found.append(pb.ProcessMemory(role=role, pid=pid, private_bytes=private, shared_bytes=shared))
    return found
