"""The serving side of the gRPC transport: the BlockTransfer servicer over a source and a sink.

Every process that serves UCX serves this too, for peers without UCX. Payloads are copied into messages, so a lease is
read only between two suspensions; a puller that stops reading loses it when the operation's time is up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import structlog
from kvmesh.v1 import transfer_pb2, transfer_pb2_grpc
from opentelemetry import propagate

from services.common.blocks import split_ids
from services.common.rpc import REQUEST_ID_METADATA
from services.common.transfer.grpc_client import EPOCH_METADATA, STOP_METADATA
from services.common.transfer.heads import HeadRange
from services.common.transfer.protocol import (
    MAX_PULL_BLOCKS,
    MAX_PUSH_BLOCKS,
    MAX_WAITING_PULL_S,
    STOP_DEADLINE,
    STOP_MISSING,
    BlockLease,
    BlockSink,
    BlockSource,
    PullRequest,
)

_log = structlog.get_logger()
_Context = grpc.aio.ServicerContext[Any, Any]


class BlockTransferServicer(transfer_pb2_grpc.BlockTransferServicer):
    """`max_operation_s` bounds every lease."""

    def __init__(self, source: BlockSource, sink: BlockSink, *, max_operation_s: float) -> None:
        self._source = source
        self._sink = sink
        self._max_operation_s = max_operation_s

    async def Pull(self, request: transfer_pb2.PullRequest, context: _Context) -> AsyncIterator[transfer_pb2.PullChunk]:
        """Leading blocks of the request; the reason for stopping short is in the trailing metadata."""
        try:
            ids = split_ids(request.block_ids)
            heads = HeadRange(request.heads.first, request.heads.count) if request.HasField("heads") else None
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not 0 < len(ids) <= MAX_PULL_BLOCKS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a pull of no or of too many blocks")
        if math.isnan(request.deadline_s) or math.isnan(request.wait_s):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a time that is no number")
        wait_s = min(max(0.0, request.wait_s), MAX_WAITING_PULL_S)
        deadline_s = min(max(0.0, request.deadline_s), MAX_WAITING_PULL_S if wait_s else self._max_operation_s)
        names = _current_traceparent(), _request_id(context)
        wanted = PullRequest(ids, request.epoch, deadline_s, *names, heads, wait_s=wait_s)
        until_s = asyncio.get_running_loop().time() + deadline_s
        stop: str | None = None
        while stop is None:
            try:
                async with asyncio.timeout_at(until_s):
                    lease = await self._source.lease(wanted)
            except TimeoutError:
                stop = STOP_DEADLINE
                break
            lent = _Lent(lease, min(until_s - asyncio.get_running_loop().time(), self._max_operation_s))
            try:
                while (chunk := lent.next_chunk()) is not None:
                    yield chunk
            finally:
                lent.release()
            wanted = replace(wanted, ids=wanted.ids[lent.num_sent :])
            stop = None if wait_s and lent.stop == STOP_MISSING and lent.num_sent else lent.stop
        context.set_trailing_metadata(((STOP_METADATA, stop),))

    async def Push(
        self, request_iterator: AsyncIterator[transfer_pb2.PushChunk], context: _Context
    ) -> transfer_pb2.PushResponse:
        """Keeps blocks one by one, so that at most one message is in memory."""
        said = _metadata(context).get(EPOCH_METADATA, "0")
        if not said.isdecimal():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an epoch that is no number")
        epoch = int(said)
        accepted = rejected = 0
        try:
            async with asyncio.timeout(self._max_operation_s):
                async for chunk in request_iterator:
                    if accepted + rejected >= MAX_PUSH_BLOCKS:
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many blocks in one push")
                    kept = 0 if rejected else await self._keep(chunk, epoch)
                    accepted, rejected = accepted + kept, rejected + 1 - kept
        except TimeoutError:
            _log.warning("a push did not end in time", accepted_blocks=accepted)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the push did not end in time")
        return transfer_pb2.PushResponse(accepted_blocks=accepted, rejected_blocks=rejected)

    async def _keep(self, chunk: transfer_pb2.PushChunk, epoch: int) -> int:
        reservation = await self._sink.reserve([chunk.header], epoch)
        if reservation.buffers:
            if len(reservation.buffers[0]) != len(chunk.payload):
                reservation.abandon()
                return 0
            reservation.buffers[0][:] = chunk.payload
        return await reservation.commit()


class _Lent:
    """A lease that ends by itself."""

    def __init__(self, lease: BlockLease, deadline_s: float) -> None:
        self.stop = lease.stop
        self._lease: BlockLease | None = lease
        self._next = 0
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._expire)

    @property
    def num_sent(self) -> int:
        """Blocks that have gone."""
        return self._next

    def next_chunk(self) -> transfer_pb2.PullChunk | None:
        """The next block, copied; None after the last one or when time is up."""
        if self._lease is None or self._next == len(self._lease.blocks):
            return None
        block = self._lease.blocks[self._next]
        self._next += 1
        return transfer_pb2.PullChunk(header=block.header, payload=bytes(block.payload), tier=block.tier)

    def release(self) -> None:
        """Give the lease back; does nothing the second time."""
        self._timer.cancel()
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release(self._next, self.stop)

    def _expire(self) -> None:
        self.stop = STOP_DEADLINE
        self.release()


def _metadata(context: _Context) -> dict[str, str]:
    return {key: str(value) for key, value in context.invocation_metadata() or ()}


def _request_id(context: _Context) -> str:
    given = _metadata(context).get(REQUEST_ID_METADATA, "")
    return "" if given == "-" else given


def _current_traceparent() -> str:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")
