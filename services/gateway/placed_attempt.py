"""One granted attempt at one worker, from its start to the one Done that closes it at the router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from kvmesh.v1.common_pb2 import CachedTokens
from kvmesh.v1.router_pb2 import OUTCOME_OK, Done, Grant, Outcome
from kvmesh.v1.worker_pb2 import KnownOutput, WorkerGenerateResponse

from services.common.rpc import caller_metadata
from services.gateway.idempotency_records import Place
from services.gateway.placement import Placement
from services.gateway.placement_job import PlacementJob
from services.gateway.worker_link import Attempt, AttemptEnded


@dataclass(slots=True, eq=False)
class PlacedAttempt:
    """State of one attempt; `end` is idempotent and releases everything. Times are monotonic, 0 for not yet.

    is_attached: another request has started it, and was granted it.
    """

    placement: Placement
    job: PlacementJob
    number: int
    grant: Grant
    asked_at_s: float
    inbox: Attempt
    heard_at_s: float
    is_admitted: bool = False
    is_stalled: bool = False
    # As told when it was admitted.
    cached_tokens: int = 0
    # Its first token waits for somebody's word, and tells nothing of its worker.
    is_held: bool = False
    # It began to draw while another did: what it says may be known.
    draws_beside: bool = False
    # It has said other tokens than were known: the rest of what it says follows from these.
    has_diverged: bool = False
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    output_tokens: int = 0
    # Of its worker's steps, as far as that has told.
    accelerator_s: float = 0.0
    is_attached: bool = False
    _is_ended: bool = False

    @classmethod
    def start(
        cls,
        placement: Placement,
        job: PlacementJob,
        number: int,
        grant: Grant,
        asked_at_s: float,
        known: Sequence[KnownOutput],
        hold_s: float = 0.0,
    ) -> PlacedAttempt:
        """Begin it at the granted worker, with the output that is known. hold_s: above 0, it waits to be resumed."""
        now_s = time.monotonic()
        inbox = placement.channels.acquire(grant.worker_address).start(
            job.worker_request(number, grant, known, hold_s),
            deadline_s=max(0.001, job.deadline_at_s - now_s),
            metadata=caller_metadata(job.request_id),
            protocol=job.protocol,
        )
        return cls(placement, job, number, grant, asked_at_s, inbox, now_s, is_held=hold_s > 0)

    @classmethod
    def attach(cls, placement: Placement, job: PlacementJob, request_id: str, place: Place) -> PlacedAttempt:
        """Read one that a worker keeps, of the request `request_id`."""
        grant = Grant(worker_id=place.worker_id, worker_address=place.address)
        inbox = placement.channels.acquire(place.address).attach(request_id, metadata=caller_metadata(job.request_id))
        now_s = time.monotonic()
        return cls(placement, job, place.attempt, grant, now_s, inbox, now_s, is_attached=True)

    @property
    def worker_id(self) -> str:
        """Who runs it."""
        return self.grant.worker_id

    def heard_tokens(self, count: int) -> None:
        """Tokens have come with what was heard last."""
        self.first_token_at_s = self.first_token_at_s or self.heard_at_s
        self.last_token_at_s = self.heard_at_s
        self.output_tokens += count

    def charge(self, message: WorkerGenerateResponse) -> None:
        """Note what a message says of the time of steps: all of the attempt so far."""
        told_s = message.tokens.accelerator_s or message.completed.accelerator_s
        self.accelerator_s = max(self.accelerator_s, told_s)

    def pulse(self, now_s: float, admit_patience_s: float) -> None:
        """Break it off when its deadline has passed or its worker has been silent for too long."""
        if now_s >= self.job.deadline_at_s:
            self.inbox.break_off(AttemptEnded(grpc.StatusCode.DEADLINE_EXCEEDED, ""))
        limit_s = self.placement.stall_timeout_s if self.is_admitted else admit_patience_s
        if now_s - self.heard_at_s > limit_s and self.inbox.break_off(AttemptEnded(grpc.StatusCode.CANCELLED, "")):
            self.is_stalled = True

    def end(self, outcome: Outcome.ValueType, cached: CachedTokens | None = None, *, is_last: bool = False) -> None:
        """Cancel what is left of it, at the worker, and tell the router. cached: as the worker has reported it.

        is_last: no other attempt follows, so that a worker which is to keep it does.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self.job.accelerator_s += self.accelerator_s
        keeper = self.job.keeper
        if is_last and self.is_admitted and keeper is not None and not keeper.is_abandoned:
            self.inbox.leave(complete=outcome == OUTCOME_OK)
        self.inbox.cancel()
        if self.is_admitted:
            self.placement.line.wake(self.job.model)
        self.placement.channels.release(self.grant.worker_address, asyncio.get_running_loop().time())
        if self.is_attached:
            return
        self.placement.router.done(
            Done(
                request_id=self.job.request_id,
                attempt=self.number,
                outcome=outcome,
                ttft_s=0.0 if self.is_held else max(0.0, self.first_token_at_s - self.asked_at_s),
                output_tokens=self.output_tokens,
                cached=cached,
                tpot_s=self._tpot_s(),
            )
        )

    def _tpot_s(self) -> float:
        further_tokens = self.output_tokens / self.job.num_choices - 1
        return (self.last_token_at_s - self.first_token_at_s) / further_tokens if further_tokens > 0 else 0.0
