"""Blocks in the hands of pullers: leases of those who asked, and the notes of those who read by the directory.

Each is counted, logged and traced as one pull served, under the puller's trace.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog
from opentelemetry import propagate, trace

from services.common.transfer.protocol import STOP_COMPLETE, STOP_HEADS, HeldBlock, PullRequest
from services.common.transfer.shares import narrowed
from services.kvstore.metrics import Totals
from services.kvstore.ram_tier import Entry, RamTier

_log = structlog.get_logger()
_tracer = trace.get_tracer("kvmesh.kvstore")


@dataclass(frozen=True, slots=True)
class Served:
    """What one pull got. path: "asked", or "read" by the puller itself."""

    num_blocks: int
    num_bytes: int
    ssd_bytes: int
    stop: str
    path: str
    duration_s: float


class StoreLease:
    """Blocks lent to one pull; a span under the puller's trace for as long."""

    def __init__(
        self,
        ram: RamTier,
        totals: Totals,
        request: PullRequest,
        from_ram: list[Entry],
        from_ssd: list[Entry],
        stop: str,
    ) -> None:
        self.stop = stop
        self.blocks = [HeldBlock(entry.header, ram.view(entry), "ram") for entry in from_ram]
        self.blocks += [HeldBlock(entry.header, ram.view(entry), "ssd") for entry in from_ssd]
        if request.heads is not None:
            num_blocks = len(self.blocks)
            self.blocks = narrowed(self.blocks, request.heads)
            self.stop = stop if len(self.blocks) == num_blocks else STOP_HEADS
        self._ram = ram
        self._totals = totals
        self._entries = from_ram + from_ssd
        self._request = request
        self._started_s = time.monotonic()
        self._span = _start_span(request, time.time_ns())

    def release(self, num_sent: int, stop: str) -> None:
        """As `BlockLease.release`."""
        self._ram.release(self._entries)
        num_bytes = sum(len(block.payload) for block in self.blocks[:num_sent])
        ssd_bytes = sum(len(block.payload) for block in self.blocks[:num_sent] if block.tier == "ssd")
        duration_s = time.monotonic() - self._started_s
        self._totals.released(num_bytes - ssd_bytes, ssd_bytes, duration_s)
        _end_span(self._span, self._request, Served(num_sent, num_bytes, ssd_bytes, stop, "asked", duration_s))


def note_read(ram: RamTier, totals: Totals, request: PullRequest, duration_s: float) -> list[Entry]:
    """Count what a peer has read by the directory. Returns the blocks that are still here."""
    entries = ram.touch(request.ids)
    num_bytes = sum(entry.slot.num_bytes for entry in entries)
    if request.heads is not None:
        blocks = [HeldBlock(entry.header, ram.view(entry), "ram") for entry in entries]
        num_bytes = sum(len(block.payload) for block in narrowed(blocks, request.heads))
    totals.was_read(len(entries), num_bytes, duration_s)
    span = _start_span(request, time.time_ns() - int(duration_s * 1e9))
    _end_span(span, request, Served(len(entries), num_bytes, 0, STOP_COMPLETE, "read", duration_s))
    return entries


def _start_span(request: PullRequest, started_ns: int) -> trace.Span:
    context = propagate.extract({"traceparent": request.traceparent}) if request.traceparent else None
    return _tracer.start_span("kvstore.pull", context, kind=trace.SpanKind.SERVER, start_time=started_ns)


def _end_span(span: trace.Span, request: PullRequest, served: Served) -> None:
    asked = len(request.ids)
    span.set_attributes(
        {
            "kvmesh.asked_blocks": asked,
            "kvmesh.sent_blocks": served.num_blocks,
            "kvmesh.sent_bytes": served.num_bytes,
            "kvmesh.path": served.path,
        }
    )
    with trace.use_span(span, end_on_exit=True):
        _log.info(
            "pull served",
            request_id=request.request_id,
            asked_blocks=asked,
            sent_blocks=served.num_blocks,
            sent_bytes=served.num_bytes,
            ssd_bytes=served.ssd_bytes,
            path=served.path,
            stop=served.stop,
            duration_s=round(served.duration_s, 6),
        )
