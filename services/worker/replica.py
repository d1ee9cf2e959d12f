"""Starts the parts of a replica in order: engine, model, mover, identity. What starts is ended with the exit stack."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

import msgspec
from kvmesh.v1 import worker_pb2

from services.common.blocks import BLOCK_TOKENS, LAYOUT_VERSION
from services.common.models import ModelSource
from services.common.registry import LocationRecord
from services.common.release import PROTOCOL, RELEASE
from services.common.security import MeshSecret
from services.common.tokenizer_digest import tokenizer_digest
from services.worker.children import Child, Part, SharedParts, secret_environment, start_child
from services.worker.config import WorkerSettings
from services.worker.engine.config import EngineConfig
from services.worker.engine_messages import Configure, EngineFailed, EngineReady, LoadProgress, RankReady
from services.worker.errors import ChildDied, StartFailed
from services.worker.mover_messages import FromMoverToFront, MoverReady
from services.worker.ranks import ReplicaName, start_engines, together, unless_leaving
from services.worker.remote_rank import Leaving

_MOVER_TIMEOUT_S = 30.0
_ROLES = {
    "both": worker_pb2.WORKER_ROLE_BOTH,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replica:
    """The running parts and what they said of themselves."""

    worker_id: str
    epoch: int
    source: ModelSource
    engine: Part
    engine_ready: EngineReady
    mover: Part
    mover_ready: MoverReady
    # The other processes that compute, where the engine is one of several.
    ranks: tuple[Part, ...] = ()
    # Told when a part of it is about to be stopped where it runs.
    leaving: Leaving = field(default_factory=Leaving)

    @property
    def child_pids(self) -> dict[str, int]:
        """Processes of the parts that have one, by role."""
        parts = (self.engine, *self.ranks, self.mover)
        return {part.role: part.pid for part in parts if part.pid is not None}


async def start_replica(
    settings: WorkerSettings,
    source: ModelSource,
    secret: MeshSecret,
    *,
    worker_id: str,
    epoch: int,
    stack: AsyncExitStack,
    progress: Callable[[LoadProgress], None],
) -> Replica:
    """Start engine and mover; progress: told how far the weights are read. Raises StartFailed with one line."""
    if settings.engine == "sim":
        return await _start_simulated(settings, source, secret, worker_id, epoch, stack)
    parts = SharedParts()
    stack.callback(parts.close)
    mover_fd = parts.engine_end.fileno()
    config = engine_config(settings, source, worker_id, front_fd=-1, mover_fd=mover_fd, pool_fd=parts.pool_fd)
    name = ReplicaName(worker_id, epoch, source.name, secret)
    engines = await start_engines(settings, config, (mover_fd, parts.pool_fd), name, stack)
    engines.engine.link.send(Configure(secret.block_key))
    loads = together(
        _first_message(engines.engine, EngineReady, settings.start_timeout_s, progress),
        *(_first_message(rank, RankReady, settings.start_timeout_s) for rank in engines.ranks),
    )
    ready, *_ = await unless_leaving(engines.leaving, loads)
    engine_ready = _of_revision(ready, settings.revision)
    mover, mover_ready = await _running_mover(settings, parts, engine_ready, worker_id, epoch, stack)
    return Replica(
        worker_id, epoch, source, engines.engine, engine_ready, mover, mover_ready, engines.ranks, engines.leaving
    )


async def _start_simulated(
    settings: WorkerSettings,
    source: ModelSource,
    secret: MeshSecret,
    worker_id: str,
    epoch: int,
    stack: AsyncExitStack,
) -> Replica:
    # A worker that computes has the engine's modules in another process.
    from services.worker.engine.sim import NoMover, start_simulation

    # The engine inherits nothing: it is in this process.
    config = engine_config(settings, source, worker_id, front_fd=-1, mover_fd=-1, pool_fd=-1)
    if not settings.sim_transfers:
        engine, ready = await start_simulation(settings, source, config, secret.block_key, stack)
        ready = _of_revision(ready, settings.revision)
        return Replica(worker_id, epoch, source, engine, ready, NoMover(), MoverReady("", "", ""))
    parts = SharedParts()
    stack.callback(parts.close)
    engine, ready = await start_simulation(settings, source, config, secret.block_key, stack, parts)
    ready = _of_revision(ready, settings.revision)
    mover, mover_ready = await _running_mover(settings, parts, ready, worker_id, epoch, stack)
    return Replica(worker_id, epoch, source, engine, ready, mover, mover_ready)


def revised_digest(digest: bytes, revision: str) -> bytes:
    """The digest of a revision of a model; of an empty one the model's own."""
    return blake2b(revision.encode(), digest_size=len(digest), key=digest).digest() if revision else digest


def _of_revision(ready: EngineReady, revision: str) -> EngineReady:
    return msgspec.structs.replace(ready, model_digest=revised_digest(ready.model_digest, revision))


def identity_proto(replica: Replica, settings: WorkerSettings) -> worker_pb2.WorkerIdentity:
    """What watchers are told of the replica."""
    ready = replica.engine_ready
    return worker_pb2.WorkerIdentity(
        worker_id=replica.worker_id,
        epoch=replica.epoch,
        model=replica.source.name,
        model_digest=ready.model_digest,
        context_length=ready.context_length,
        dtype=ready.dtype,
        kv_dtype=ready.kv_dtype,
        weight_format=ready.weight_format,
        block_tokens=BLOCK_TOKENS,
        layout_version=LAYOUT_VERSION,
        vocab_size=ready.vocab_size,
        tokenizer_digest=tokenizer_digest(replica.source),
        total_blocks=ready.num_blocks,
        block_bytes=ready.block_bytes,
        pull_address=replica.mover_ready.pull_address,
        prefill_tokens_per_s=ready.prefill_tokens_per_s,
        decode_step_s=ready.decode_step_s,
        step_token_budget=settings.step_token_budget,
        max_running_requests=settings.max_running,
        role=_ROLES[settings.role],
        device=settings.device,
        protocol=PROTOCOL,
        adapter_slots=ready.adapter_slots,
        max_adapter_rank=ready.max_adapter_rank,
        pooling=settings.pooling,
    )


def location_record(replica: Replica, settings: WorkerSettings, *, address: str, metrics: str) -> LocationRecord:
    """The replica's record in the registry."""
    return LocationRecord(
        kind="worker",
        id=replica.worker_id,
        epoch=replica.epoch,
        host=host_name(settings),
        grpc_address=address,
        pull_address=replica.mover_ready.pull_address,
        transfer_grpc_address=replica.mover_ready.grpc_address,
        metrics_address=metrics,
        model=replica.source.name,
        model_digest=replica.engine_ready.model_digest.hex(),
        started_s=replica.epoch // 1_000_000,
        release=RELEASE,
    )


def host_name(settings: WorkerSettings) -> str:
    """Name by which locations on one host know each other."""
    return settings.advertise_host or settings.listen.rpartition(":")[0]


def engine_config(
    settings: WorkerSettings, source: ModelSource, worker_id: str, *, front_fd: int, mover_fd: int, pool_fd: int
) -> EngineConfig:
    """What an engine is told of the settings."""
    return EngineConfig(
        parent_pid=os.getpid(),
        instance=worker_id,
        log_level=settings.log_level,
        front_fd=front_fd,
        mover_fd=mover_fd,
        pool_fd=pool_fd,
        model_path=str(source.path),
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
        threads=settings.threads,
        device=settings.device,
        exact=settings.exact,
        kv_dtype=settings.kv_dtype,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_cache_fraction=settings.kv_cache_fraction,
        staging_bytes=settings.staging_bytes,
        num_blocks=settings.num_blocks,
        max_context=settings.max_context,
        max_adapters=settings.max_adapters,
        max_adapter_rank=settings.max_adapter_rank,
        max_adapter_bytes=settings.max_adapter_bytes,
        max_adapter_waiting=settings.max_adapter_waiting,
        adapter_wait_s=settings.adapter_wait_s,
        step_token_budget=settings.step_token_budget,
        target_step_s=settings.target_step_s,
        max_running=settings.max_running,
        speculation_tokens=settings.drafted_tokens,
        speculation_rows=settings.speculation_rows,
        pooling=settings.pooling,
        max_queue_s=settings.max_queue_s,
        prefix_cache=settings.prefix_cache,
        max_pull_s=settings.max_pull_s,
        pull_half_life_s=settings.pull_half_life_s,
        push_policy="write_through" if settings.push == "off" else settings.push,
        max_push_blocks=settings.max_push_blocks,
        repush_bytes_per_s=settings.repush_bytes_per_s,
        max_served_blocks=settings.max_served_blocks,
    )


async def _running_mover(
    settings: WorkerSettings,
    parts: SharedParts,
    ready: EngineReady,
    worker_id: str,
    epoch: int,
    stack: AsyncExitStack,
) -> tuple[Child, MoverReady]:
    mover = await _start_mover(settings, parts, ready, worker_id, epoch)
    stack.push_async_callback(mover.end)
    return mover, await _first_message(mover, MoverReady, _MOVER_TIMEOUT_S)


async def _start_mover(
    settings: WorkerSettings, parts: SharedParts, ready: EngineReady, worker_id: str, epoch: int
) -> Child:
    front_end, child_end = socket.socketpair()
    config = {
        "engine_fd": parts.mover_end.fileno(),
        "front_fd": child_end.fileno(),
        "pool_fd": parts.pool_fd,
        "num_blocks": ready.transfer_slots,
        "block_bytes": ready.block_bytes,
        "num_kv_heads": ready.block_shape[0],
        "block_shape": ready.block_shape,
        "listen_host": settings.listen.rpartition(":")[0],
        "advertise_host": settings.advertise_host,
        "worker_id": worker_id,
        "epoch": epoch,
        "model_digest_hex": ready.model_digest.hex(),
        "parent_pid": os.getpid(),
        "layout_version": LAYOUT_VERSION,
        "kv_dtype": ready.kv_dtype,
    }
    return await start_child(
        "mover",
        "services.worker.mover",
        json.dumps(config).encode(),
        front_end=front_end,
        child_end=child_end,
        fds=(parts.mover_end.fileno(), parts.pool_fd),
        receives=FromMoverToFront,
        environment={**secret_environment(settings), "KVMESH_LOG_LEVEL": settings.log_level},
    )


async def _first_message(
    child: Part, kind: type[T], timeout_s: float, progress: Callable[[LoadProgress], None] | None = None
) -> T:
    """The message by which a child says that it is ready; what else it says before is not for us."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await child.link.receive()
                if isinstance(message, kind):
                    return message
                if isinstance(message, EngineFailed):
                    raise StartFailed(message.detail, message.kind)
                if isinstance(message, LoadProgress) and progress is not None:
                    progress(message)
    except TimeoutError:
        raise StartFailed(f"the {child.role} was not ready within {timeout_s:.0f} s") from None
    except ConnectionError:
        await child.end()
        try:
            await child.watch()
        except ChildDied as died:
            raise StartFailed(f"{died} while it started") from None
