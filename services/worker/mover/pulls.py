"""Pulls for the engine: runs at several holders, in order, verified block by block as they arrive.

Every PullBlocks gets exactly one PullDone, after the transport has let go of every slot. A run that ends short ends
the pull: what comes after it would have no prefix. A pull that loses its race is cut: PullCut at once, PullDone later.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from opentelemetry import propagate, trace

from services.common.blocks import BlockId, split_ids
from services.common.transfer.errors import BlockInvalid, PeerLost, TransferError, TransferTimeout
from services.common.transfer.header import BlockFormat, verify_block
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import (
    CONNECT_TIMEOUT_S,
    STOP_DEADLINE,
    STOP_OVERLOAD,
    PeerAddress,
    PullRequest,
    PullResult,
    Transport,
)
from services.worker.messages import HolderRun
from services.worker.mover.counters import Counters
from services.worker.mover.node_health import NodeHealth
from services.worker.mover.pool import INLINE_BYTES, SharedPool
from services.worker.mover.pull_progress import PullProgress, Race
from services.worker.mover_messages import CancelPull, PullBlocks, PullCut, PullDone

MAX_CONCURRENT_PULLS = 256
# Failures in a row after which pulls from a kvstore node rest.
_FAILURES_UNTIL_REST = 2
_LATE = "late"
_TIERS = {"worker": {"peer"}, "kvstore": {"ram", "ssd"}}
_log = structlog.get_logger()
_tracer = trace.get_tracer("kvmesh.mover")


@dataclass(frozen=True, slots=True)
class PullerStatistics:
    """Pulls under way."""

    num_running: int


class Puller:
    """Runs pulls as tasks of `group`."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        transport: Transport,
        pool: SharedPool,
        block_format: BlockFormat,
        heads: HeadRange,
        counters: Counters,
        health: NodeHealth,
        done: Callable[[PullDone | PullCut], None],
    ) -> None:
        self._group = group
        self._transport = transport
        self._pool = pool
        self._format = block_format
        # None asks for whole blocks.
        self._heads = None if heads == block_format.all_heads else heads
        self._counters = counters
        self._health = health
        self._done = done
        self._running: dict[int, tuple[PullProgress, asyncio.Task[None]]] = {}

    def start(self, message: PullBlocks) -> None:
        """Begin a pull; refuses it at once when too many run."""
        if len(self._running) >= MAX_CONCURRENT_PULLS or message.key in self._running:
            self._counters.failed_pulls += 1
            self._done(PullDone(message.key, 0, [], "too many pulls"))
            return
        progress = PullProgress(time.monotonic)
        self._running[message.key] = progress, self._group.create_task(self._run(message, progress))

    def statistics(self) -> PullerStatistics:
        """A snapshot."""
        return PullerStatistics(len(self._running))

    def cancel(self, message: CancelPull) -> None:
        """End a pull; its PullDone still comes. Unknown keys are ignored."""
        if message.key not in self._running:
            return
        progress, task = self._running[message.key]
        progress.is_cancelled = True
        if progress.has_begun:
            task.cancel()

    def _cut(self, message: PullBlocks, progress: PullProgress) -> None:
        """The race is lost: the engine goes on with what is here, and the transport is made to let go of the rest."""
        if progress.is_cancelled:
            return
        progress.end_run(_LATE)
        progress.cut_blocks = len(progress.tiers)
        tiers = progress.tiers[: progress.cut_blocks]
        self._done(PullCut(message.key, progress.cut_blocks, tiers, progress.timings))
        self._running[message.key][1].cancel()

    async def _run(self, message: PullBlocks, progress: PullProgress) -> None:
        progress.has_begun = True
        race = Race(
            progress, message.patience_s, message.block_compute_s, functools.partial(self._cut, message, progress)
        )
        context = propagate.extract({"traceparent": message.traceparent}) if message.traceparent else None
        with _tracer.start_as_current_span("pull", context, kind=trace.SpanKind.CLIENT) as span:
            try:
                if not progress.is_cancelled:
                    await self._pull_runs(message, progress)
            except asyncio.CancelledError:
                # Only CancelPull and a lost race cancel a single pull; the end of the process cancels the whole group.
                progress.is_cancelled = progress.cut_blocks is None
            except (TransferError, ValueError, IndexError) as error:
                progress.error = f"{type(error).__name__}: {error}"
            finally:
                race.end()
                del self._running[message.key]
                if progress.is_cancelled or progress.cut_blocks is not None:
                    progress.error = "cancelled" if progress.is_cancelled else _LATE
                self._finish(message, progress, span)

    async def _pull_runs(self, message: PullBlocks, progress: PullProgress) -> None:
        ids = split_ids(message.ids)
        buffers = [self._pool.slot(slot) for slot in message.slots]
        for run in message.runs:
            first, end = run.first_block, run.first_block + run.num_blocks
            if first != len(progress.tiers) or end > len(ids) or run.num_blocks == 0:
                progress.error = "the plan has a gap"
                return
            left_s = message.deadline_s - (time.monotonic() - progress.started_s)
            if left_s <= 0:
                progress.error = STOP_DEADLINE
                return
            if self._rests(run):
                progress.error = "the node rests after failures"
                return
            progress.begin_run(run.num_blocks)
            received = _Received(ids[first:end], buffers[first:end], run, self._format, self._heads, progress)
            try:
                traceparent = _traceparent(message.traceparent)
                names = traceparent, message.request_id
                request = PullRequest(ids[first:end], run.epoch, left_s, *names, self._heads, wait_s=run.wait_s)
                result = await self._pull(run, request, buffers[first:end], received)
            except TransferError as error:
                progress.end_run(_LATE if isinstance(error, TransferTimeout) else "failed")
                raise
            finally:
                await received.verify_rest()
            progress.end_run(_outcome(result.stop, received.fault))
            progress.transports.add(result.transport)
            self._counters.pulled_over(result.transport, result.num_blocks * self._pool.block_bytes)
            if len(progress.tiers) < end:
                progress.error = received.fault or result.stop
                return

    async def _pull(
        self, run: HolderRun, request: PullRequest, buffers: list[memoryview], received: _Received
    ) -> PullResult:
        """One run, and what it says of the node's health."""
        peer = PeerAddress(run.pull_address, run.grpc_address)
        try:
            result = await self._transport.pull(peer, request, buffers, received.on_block)
        except (PeerLost, TransferTimeout) as error:
            # A pull that had next to no time says nothing.
            if run.kind == "kvstore" and (isinstance(error, PeerLost) or request.deadline_s > CONNECT_TIMEOUT_S):
                self._health.failed(run.location_id, run.epoch, time.monotonic())
            raise
        if run.kind == "kvstore":
            self._health.worked(run.location_id, run.epoch)
        return result

    def _rests(self, run: HolderRun) -> bool:
        """Whether the node is not to be asked now. Workers that are lost leave the router's view at once."""
        now_s = time.monotonic()
        return run.kind == "kvstore" and self._health.rests(
            run.location_id, run.epoch, now_s, after=_FAILURES_UNTIL_REST
        )

    def _finish(self, message: PullBlocks, progress: PullProgress, span: trace.Span) -> None:
        count = progress.num_blocks
        num_bytes = count * self._pool.block_bytes
        duration_s = max(time.monotonic() - progress.started_s, 1e-6)
        self._counters.pulled_blocks += count
        self._counters.pulled_bytes += num_bytes
        if progress.error not in ("", _LATE):
            self._counters.failed_pulls += 1
        if progress.error.startswith("invalid"):
            self._counters.verification_failures += 1
        asked = sum(run.num_blocks for run in message.runs)
        span.set_attributes({"kvmesh.asked_blocks": asked, "kvmesh.pulled_blocks": count, "kvmesh.bytes": num_bytes})
        _log.info(
            "pull ended",
            request_id=message.request_id,
            asked_blocks=asked,
            pulled_blocks=count,
            holders=[run.location_id for run in message.runs],
            transport=",".join(sorted(progress.transports)),
            error=progress.error,
            duration_s=round(duration_s, 6),
        )
        timings = progress.timings if progress.cut_blocks is None else []
        self._done(PullDone(message.key, count, progress.tiers[:count], progress.error, timings))


class _Received:
    """Verifies the blocks of one run in order. After the first bad one nothing counts any more."""

    def __init__(
        self,
        ids: list[BlockId],
        buffers: list[memoryview],
        run: HolderRun,
        block_format: BlockFormat,
        heads: HeadRange | None,
        progress: PullProgress,
    ) -> None:
        self.fault = ""
        self._ids = ids
        self._buffers = buffers
        self._run = run
        self._format = block_format
        self._heads = heads
        self._progress = progress
        self._later: deque[tuple[int, bytes, str]] = deque()
        self._thread: asyncio.Future[None] | None = None

    def on_block(self, index: int, header: bytes, tier: str) -> None:
        """A block has arrived."""
        if len(self._buffers[index]) > INLINE_BYTES:
            self._later.append((index, header, tier))
            self._verify_in_thread()
        else:
            self._verify(index, header, tier)

    async def verify_rest(self) -> None:
        """Wait for blocks that are verified off the loop."""
        while self._later or (self._thread is not None and not self._thread.done()):
            self._verify_in_thread()
            if self._thread is not None:
                await asyncio.wait((self._thread,))

    def _verify_in_thread(self) -> None:
        """Verify what has come while more is coming; one thread at a time, in order."""
        if self._thread is None or self._thread.done():
            self._thread = asyncio.get_running_loop().run_in_executor(None, self._verify_all)

    def _verify_all(self) -> None:
        while self._later:
            self._verify(*self._later.popleft())

    def _verify(self, index: int, header: bytes, tier: str) -> None:
        if self.fault:
            return
        try:
            if tier not in _TIERS[self._run.kind]:
                raise BlockInvalid("tier")
            verify_block(header, self._buffers[index], self._ids[index], self._format, self._heads)
        except BlockInvalid as error:
            self.fault = f"invalid {error.reason}"
            _log.warning("a pulled block is not usable", reason=error.reason, holder=self._run.location_id)
            return
        self._progress.arrived(tier)


def _outcome(stop: str, fault: str) -> str:
    """What the end of a run says of the link."""
    if fault or stop == STOP_OVERLOAD:
        return "failed"
    return _LATE if stop == STOP_DEADLINE else "short"


def _traceparent(fallback: str) -> str:
    """The current span's, so that the holder's span hangs below it."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", fallback)
