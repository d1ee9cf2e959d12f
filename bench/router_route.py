"""Decisions through gRPC: a router process with many workers, asked on one Route stream at a fixed rate.

The process is the router's service on the mesh's server, with telemetry on and decisions kept for `kvmesh ctl
explain`. Every worker can be pulled from; index and worker table are filled directly, and each worker's report enters
the table every 100 ms, one after another. Left out is what a Redis and a Watch stream to every worker cost beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc.aio
from kvmesh.v1 import router_pb2, router_pb2_grpc

from bench.router_index import fill
from bench.router_workload import CONVERSATION, Workload, build
from services.common.blocks import BLOCK_TOKENS
from services.common.process import spare_collections
from services.common.redis_client import RedisHealth
from services.common.registry import LocationRecord
from services.common.rpc import MeshServer, call_metadata, open_channel
from services.common.security import MeshSecret
from services.common.telemetry import process_telemetry
from services.router.admission import AdmissionConfig
from services.router.control.table import ControlTable
from services.router.decisions import Decisions
from services.router.domain import Identity, Load, WorkerId
from services.router.metrics import RouterMetrics
from services.router.models_feed import ModelsFeed
from services.router.placement import PlacementConfig
from services.router.service import RouterService
from services.router.workers import WorkerTable

Call = grpc.aio.StreamStreamCall[router_pb2.RouteRequest, router_pb2.RouteResponse]
_SECRET = MeshSecret("bench-router-" + "s" * 32)
_MODEL, _DIGEST = "m", b"d" * 16
_REPORT_EVERY_S = 0.1
# Reports are spread over the period, as those of workers that know nothing of each other are.
_REPORT_SLICES = 100
_START_DEADLINE_S = 120.0
_ANSWER_DEADLINE_S = 10.0
# A request is closed so many asks after its own.
_OPEN_ASKS = 200
# As many as a router keeps that nobody has told otherwise.
_EXPLAINED = 4096


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """cpu_share: of one core, taken by the router's process."""

    num_workers: int
    asks_per_s: float
    num_blocks: int
    granted: int
    p50_ms: float
    p99_ms: float
    cpu_share: float


def report(table: WorkerTable, number: int, now_s: float) -> None:
    """A worker says how it is: some are busier than others."""
    load = Load(
        progress=int(now_s * 100),
        ready=True,
        draining=False,
        running_requests=number % 8,
        waiting_requests=0,
        queued_prefill_tokens=number % 700,
        decoding_sequences=number % 8,
        free_blocks=50_000,
    )
    table.report(WorkerId(f"w{number}"), load, now_s)


def add_workers(table: WorkerTable, count: int, now_s: float) -> None:
    """`count` workers that differ in their load only."""
    for number in range(count):
        worker_id = WorkerId(f"w{number}")
        table.add(
            LocationRecord(
                kind="worker", id=worker_id, epoch=1, host=f"h{number % 125}", grpc_address="h:1", pull_address="h:2"
            )
        )
        table.identify(worker_id, _identity(worker_id), now_s)
        report(table, number, now_s)


def _identity(worker_id: WorkerId) -> Identity:
    return Identity(
        worker_id=worker_id,
        epoch=1,
        model=_MODEL,
        model_digest=_DIGEST,
        context_length=131_072,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        weight_format="",
        block_tokens=BLOCK_TOKENS,
        layout_version=1,
        vocab_size=1,
        tokenizer_digest=b"",
        total_blocks=100_000,
        block_bytes=1 << 20,
        prefill_tokens_per_s=20_000,
        decode_step_s=0.01,
        step_token_budget=2048,
        max_running_requests=64,
    )


def _serve(parent: Connection, num_workers: int, num_blocks: int) -> None:
    with process_telemetry("router", "bench", level="ERROR", metrics_listen="127.0.0.1:0"):
        asyncio.run(_serve_until_told(parent, num_workers, num_blocks))


async def _serve_until_told(parent: Connection, num_workers: int, num_blocks: int) -> None:
    config = PlacementConfig("predicted_ttft", AdmissionConfig(60.0))
    decisions = Decisions(config, RedisHealth(), RouterMetrics(), pending_timeout_s=5.0, explained_requests=_EXPLAINED)
    fill(decisions.replica, build(num_workers, num_blocks))
    add_workers(decisions.table, num_workers, time.monotonic())
    decisions.holders.changed()
    server = MeshServer("127.0.0.1:0", secret=_SECRET)
    service = RouterService(decisions, ModelsFeed(decisions.table, ControlTable()))
    server.add(
        router_pb2_grpc.add_RouterServicer_to_server,
        service,
        router_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    )
    spare_collections()
    parent.send(await server.start())
    reports = asyncio.create_task(_reports(decisions.table, num_workers))
    await asyncio.to_thread(parent.recv)
    reports.cancel()
    await server.stop(0.1)


async def _reports(table: WorkerTable, num_workers: int) -> None:
    began_s = time.monotonic()
    for turn in itertools.count():
        for number in range(turn % _REPORT_SLICES, num_workers, _REPORT_SLICES):
            report(table, number, time.monotonic())
        next_s = began_s + (turn + 1) * _REPORT_EVERY_S / _REPORT_SLICES
        await asyncio.sleep(next_s - time.monotonic())


def measure(num_workers: int, num_blocks: int, prompt_blocks: int, asks_per_s: float, count: int) -> RouteFigures:
    """Start the process, ask, and stop it. Raises TimeoutError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, num_workers, num_blocks))
    process.start()
    try:
        if not ours.poll(_START_DEADLINE_S):
            raise TimeoutError("the router's process did not start")
        assert process.pid is not None
        workload = build(num_workers, num_blocks)
        return asyncio.run(_drive(ours.recv(), process.pid, workload, prompt_blocks, asks_per_s, count))
    finally:
        ours.send(None)
        process.join(_ANSWER_DEADLINE_S)
        process.kill()


async def _drive(
    address: str, pid: int, workload: Workload, prompt_blocks: int, asks_per_s: float, count: int
) -> RouteFigures:
    joined = [b"".join(ids) for ids in workload.prompts(CONVERSATION, prompt_blocks, count)]
    channel = open_channel(address)
    stub = router_pb2_grpc.RouterStub(channel)
    call: Call = stub.Route(metadata=call_metadata(_SECRET))  # type: ignore[call-arg]
    asked_s: list[float] = []
    waits_s: list[float] = []
    granted = 0
    cpu_before_s, began_s = _cpu_s(pid), time.perf_counter()

    async def ask() -> None:
        for number, block_ids in enumerate(joined):
            await asyncio.sleep(began_s + number / asks_per_s - time.perf_counter())
            message = router_pb2.Ask(
                request_id=f"r{number}",
                attempt=1,
                model=_MODEL,
                model_digest=_DIGEST,
                block_ids=block_ids,
                prompt_tokens=prompt_blocks * BLOCK_TOKENS + 8,
                max_output_tokens=128,
            )
            asked_s.append(time.perf_counter())
            await call.write(router_pb2.RouteRequest(ask=message))
            if number >= _OPEN_ASKS:
                done = router_pb2.Done(
                    request_id=f"r{number - _OPEN_ASKS}", attempt=1, outcome=router_pb2.OUTCOME_OK, ttft_s=0.1
                )
                await call.write(router_pb2.RouteRequest(done=done))

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(count / asks_per_s + _ANSWER_DEADLINE_S):
        for number in range(count):
            answer = await call.read()
            waits_s.append(time.perf_counter() - asked_s[number])
            granted += isinstance(answer, router_pb2.RouteResponse) and answer.HasField("grant")
        await asking
    seconds, cpu_s = time.perf_counter() - began_s, _cpu_s(pid) - cpu_before_s
    call.cancel()
    await channel.close(None)
    waits_s.sort()
    return RouteFigures(
        num_workers=workload.num_locations,
        asks_per_s=count / seconds,
        num_blocks=prompt_blocks,
        granted=granted,
        p50_ms=waits_s[count // 2] * 1e3,
        p99_ms=waits_s[count * 99 // 100] * 1e3,
        cpu_share=cpu_s / seconds,
    )


def _cpu_s(pid: int) -> float:
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
