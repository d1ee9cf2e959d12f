"""A Watch stream to each registered worker: identity and load go into the worker table.

A stream that breaks makes its worker suspect at once and is opened again with backoff; one that is silent is closed
after a while and opened again. A worker whose registry record is gone stays for as long as its stream does: the
record is not a sign of life, the stream is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Literal

import grpc
import grpc.aio
import structlog
from kvmesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from services.common.fair_queue import NUM_CLASSES
from services.common.keys import life_key
from services.common.redis_client import Backoff
from services.common.registry import LocationRecord, RegistryChange
from services.common.release import FIRST_PROTOCOL
from services.common.rpc import call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.step_costs import StepCosts
from services.router.domain import HolderLinks, Identity, Load, MeasuredLink, WorkerId
from services.router.errors import WrongWorkerError
from services.router.workers import WorkerTable

# A stream without a report for this long is given up.
SILENCE_S = 2.0
# What is said to be slower is counted as this.
_LEAST_BYTES_PER_S = 1.0
_KINDS: dict[common_pb2.LocationKind.ValueType, Literal["worker", "kvstore"]] = {
    common_pb2.LOCATION_KIND_WORKER: "worker",
    common_pb2.LOCATION_KIND_KVSTORE: "kvstore",
}
_ROLES = {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}
_log = structlog.get_logger()


class WorkerWatcher:
    """Feeds `table`; call `registry_changed` for each change of a worker's record while `run` runs."""

    def __init__(self, table: WorkerTable, secret: MeshSecret, on_membership: Callable[[], None]) -> None:
        """on_membership: called when a worker has come, gone or changed its epoch."""
        self._table = table
        self._secret = secret
        self._on_membership = on_membership
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._orphans: set[WorkerId] = set()
        self._untried: dict[WorkerId, asyncio.Event] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Watch until cancelled; starts with the workers known by then."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for worker in list(self._table.workers.values()):
                self._start(worker.record)
            await asyncio.Event().wait()

    async def tried(self, timeout_s: float) -> None:
        """Wait until every worker known now has reported or failed to, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for event in list(self._untried.values()):
                    await event.wait()

    def registry_changed(self, change: RegistryChange) -> None:
        """A worker has registered, changed or gone."""
        worker_id = WorkerId(change.record.id)
        if change.gone:
            worker = self._table.workers.get(worker_id)
            if worker is not None and self._table.rows["up"][worker.row]:
                self._orphans.add(worker_id)
            elif worker is not None:
                self._drop(worker_id)
            return
        self._orphans.discard(worker_id)
        known = self._table.workers.get(worker_id)
        unchanged = known is not None and known.record == change.record
        self._table.add(change.record)
        self._on_membership()
        if not unchanged or worker_id not in self._tasks:
            self._start(change.record)

    def _start(self, record: LocationRecord) -> None:
        if self._group is None:
            return
        worker_id = WorkerId(record.id)
        before = self._tasks.pop(worker_id, None)
        if before is not None:
            before.cancel()
        self._untried.setdefault(worker_id, asyncio.Event())
        self._tasks[worker_id] = self._group.create_task(self._watch(record), name=f"watch {record.id}")

    def _mark_tried(self, worker_id: WorkerId) -> None:
        event = self._untried.pop(worker_id, None)
        if event is not None:
            event.set()

    def _drop(self, worker_id: WorkerId) -> None:
        self._orphans.discard(worker_id)
        self._mark_tried(worker_id)
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()
        self._table.forget(worker_id)
        self._on_membership()
        _log.info("worker gone", worker_id=worker_id)

    async def _watch(self, record: LocationRecord) -> None:
        worker_id, backoff, told = WorkerId(record.id), Backoff(), ""
        channel = open_channel(record.grpc_address)
        try:
            while True:
                began_s = time.monotonic()
                detail = await self._follow(channel, record)
                self._table.broken(worker_id)
                self._mark_tried(worker_id)
                if worker_id in self._orphans:
                    self._drop(worker_id)
                has_lasted = time.monotonic() - began_s > SILENCE_S
                if has_lasted:
                    backoff.reset()
                # The same failure at every attempt is told once.
                if has_lasted or detail != told:
                    _log.warning("worker suspect", worker_id=worker_id, detail=detail)
                told = detail
                await asyncio.sleep(backoff.next_s())
        finally:
            await channel.close(None)

    async def _follow(self, channel: grpc.aio.Channel, record: LocationRecord) -> str:
        """Take reports in until the stream breaks; why it did."""
        identified = False
        try:
            async for report in self._reports(channel):
                if not identified:
                    self._identify(record, report)
                    identified = True
                if report.HasField("load"):
                    load, silent_s = load_of(report.load), max(0.0, report.silent_s)
                    self._table.report(WorkerId(record.id), load, time.monotonic(), silent_s=silent_s)
                    self._mark_tried(WorkerId(record.id))
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except (TimeoutError, WrongWorkerError) as error:
            return str(error) or "silent"
        return "ended"

    async def _reports(self, channel: grpc.aio.Channel) -> AsyncIterator[worker_pb2.WorkerReport]:
        """Reports until the stream ends. Raises AioRpcError, or TimeoutError when it is silent."""
        call = worker_pb2_grpc.WorkerStub(channel).Watch(
            worker_pb2.WatchRequest(), metadata=call_metadata(self._secret)
        )
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    report = await call.read()
                if not isinstance(report, worker_pb2.WorkerReport):
                    return
                yield report
        finally:
            call.cancel()

    def _identify(self, record: LocationRecord, report: worker_pb2.WorkerReport) -> None:
        """The first report of a stream. Raises WrongWorkerError."""
        identity = identity_of(report.identity)
        if (identity.worker_id, identity.epoch) != (record.id, record.epoch):
            raise WrongWorkerError(f"{identity.worker_id} at the address of {record.id}")
        self._table.identify(identity.worker_id, identity, time.monotonic())
        _log.info("worker seen", worker_id=record.id, address=record.grpc_address, model=identity.model)


def identity_of(message: worker_pb2.WorkerIdentity) -> Identity:
    """The domain's form of a worker's identity."""
    return Identity(
        worker_id=WorkerId(message.worker_id),
        epoch=message.epoch,
        model=message.model,
        model_digest=message.model_digest,
        context_length=message.context_length,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        weight_format=message.weight_format,
        block_tokens=message.block_tokens,
        layout_version=message.layout_version,
        vocab_size=message.vocab_size,
        tokenizer_digest=message.tokenizer_digest,
        total_blocks=message.total_blocks,
        block_bytes=message.block_bytes,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_step_s=message.decode_step_s,
        step_token_budget=message.step_token_budget,
        max_running_requests=message.max_running_requests,
        role=_ROLES.get(message.role, "both"),
        device=message.device,
        protocol=message.protocol or FIRST_PROTOCOL,
        adapter_slots=message.adapter_slots,
        max_adapter_rank=message.max_adapter_rank,
        pooling=message.pooling,
    )


def load_of(message: worker_pb2.WorkerLoad) -> Load:
    """The domain's form of a worker's load."""
    return Load(
        progress=message.progress,
        ready=message.ready,
        draining=message.draining,
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        decoding_sequences=message.decoding_sequences,
        free_blocks=message.free_blocks,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        decode_step_s=message.decode_step_s,
        queued_prefill_pairs=message.queued_prefill_pairs,
        waiting_prefill_tokens=(*message.waiting_prefill_tokens, *(0,) * NUM_CLASSES)[:NUM_CLASSES],
        context_tokens=message.context_tokens,
        step_tokens=message.step_tokens,
        step_costs=_step_costs_of(message.step_costs) if message.HasField("step_costs") else None,
        cached_blocks=message.cached_blocks,
        admitted=tuple(message.admitted),
        ended=tuple(message.ended),
        holders=tuple(_holder_of(one) for one in message.holders if one.kind in _KINDS),
        adapters=frozenset(message.adapters),
        idle_adapter_slots=message.idle_adapter_slots,
        adapter_load_s=max(0.0, message.adapter_load_s),
    )


def _step_costs_of(message: worker_pb2.StepCosts) -> StepCosts:
    """None of them below zero."""
    return StepCosts(*(max(0.0, getattr(message, field.name)) for field in fields(StepCosts)))


def _holder_of(message: worker_pb2.HolderLinks) -> HolderLinks:
    return HolderLinks(
        life_key(_KINDS[message.kind], message.location_id, message.epoch),
        _link_of(message.memory) if message.HasField("memory") else None,
        _link_of(message.ssd) if message.HasField("ssd") else None,
        message.in_flight_bytes,
    )


def _link_of(message: worker_pb2.MeasuredLink) -> MeasuredLink:
    return MeasuredLink(
        max(_LEAST_BYTES_PER_S, message.bytes_per_s), max(0.0, message.setup_s), min(1.0, max(0.0, message.freshness))
    )
