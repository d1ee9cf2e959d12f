"""How one prompt gets its next worker: turns in the fair line, asks to the router, and waiting where there is none.

What a worker has admitted before is asked for as work that goes on: no objective stands in its way, and it also waits,
for `rescue_wait_s` and outside the line, while there is no worker at all.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvmesh.v1.router_pb2 import Ask, Grant
from opentelemetry import trace

from services.gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    ModelNotFound,
    ModelUnavailable,
    Overloaded,
    WorkerFailed,
    WorkersFull,
)
from services.gateway.output_record import OutputRecord
from services.gateway.placed_attempt import PlacedAttempt
from services.gateway.placement import Placement
from services.gateway.placement_job import PlacementJob
from services.gateway.setbacks import Setbacks
from services.gateway.tickets import Ticket

_tracer = trace.get_tracer("kvmesh.gateway")


@dataclass(slots=True, eq=False)
class Placing:
    """Owner of the prompt's ticket. is_accepted: a worker has admitted it. route_s: seconds waited, in all."""

    placement: Placement
    job: PlacementJob
    output: OutputRecord
    setbacks: Setbacks = field(default_factory=Setbacks)
    is_accepted: bool = False
    route_s: float = 0.0
    _attempts: int = 0
    _ticket: Ticket | None = None
    _left: bool = False

    async def start(self) -> PlacedAttempt | None:
        """Take a turn, ask, and start an attempt where the router says; None when nobody could take it now.

        Raises GatewayError, and CancelledError after `leave`.
        """
        started_s = time.monotonic()
        line = self.placement.line
        if self._ticket is None:
            self._ticket = line.join(self.job.wanted(is_accepted=self.is_accepted))
        ticket = self._ticket
        await line.turn(ticket)
        number, asked_at_s = self.next_number(), time.monotonic()
        if asked_at_s >= self.job.deadline_at_s:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        try:
            grant = await self.granted(self._ask(ticket, number, asked_at_s))
        except WorkersFull as full:
            self._check_stays()
            line.full(ticket, full.retry_after_s, full.room_in_s)
            return None
        except (ModelUnavailable, ModelNotFound, Overloaded) as error:
            self._check_stays()
            await self._wait_for_a_worker(ticket, error)
            return None
        finally:
            self.route_s += time.monotonic() - started_s
        # The number of the second part is the router's choice.
        self._attempts = max(self._attempts, grant.handoff.attempt)
        line.granted(ticket, grant.predicted_ttft_s)
        self.setbacks.granted(time.monotonic())
        return PlacedAttempt.start(self.placement, self.job, number, grant, asked_at_s, self.output.known())

    async def granted(self, ask: Ask) -> Grant:
        """The router's answer. Raises GatewayError, and CancelledError after `leave`; what comes then is closed."""
        with _tracer.start_as_current_span("route") as span:
            grant = await self.placement.router.ask(ask, self.job.deadline_at_s)
            span.set_attributes({"kvmesh.worker_id": grant.worker_id, "kvmesh.attempt": ask.attempt})
        if self._left:
            self.placement.router.give_back(grant)
            raise asyncio.CancelledError
        return grant

    def next_number(self) -> int:
        """Number of one more attempt."""
        self._attempts += 1
        return self._attempts

    def again(self) -> None:
        """The granted worker has not taken the prompt, or has failed: back to the front of the line."""
        if self._ticket is not None:
            self.placement.line.again(self._ticket, is_accepted=self.is_accepted)

    def retry(self) -> None:
        """The same, for one more of the attempts that the tenant may make. Raises WorkerFailed."""
        if not self.placement.retries.take(self.job.tenant, time.monotonic()):
            self.placement.metrics.count_retry("over_budget")
            raise WorkerFailed("the worker failed, and too many requests of this tenant are retried already")
        self.again()

    def leave(self, cached_tokens: int) -> None:
        """No worker is wanted any more; the tenant is charged what was computed. Idempotent."""
        self._left = True
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            output_tokens = self.output.num_tokens if self.is_accepted else None
            self.placement.line.leave(ticket, cached_tokens=cached_tokens, output_tokens=output_tokens)

    def _ask(self, ticket: Ticket, number: int, asked_at_s: float) -> Ask:
        excluded = self.setbacks.excluded
        if self.is_accepted:
            return self.job.ask_again(number, excluded, ticket.asks_as, self.output)
        return self.job.ask(number, excluded, ticket.asks_as, self.job.objectives_left(asked_at_s))

    async def _wait_for_a_worker(self, ticket: Ticket, error: GatewayError) -> None:
        """For a while, if the prompt was accepted. Raises `error` otherwise."""
        now_s = time.monotonic()
        pause_s = self.setbacks.unserved(now_s, self.placement.rescue_wait_s) if self.is_accepted else None
        if pause_s is None:
            raise error
        self.placement.metrics.count_retry("no_worker")
        self.placement.line.set_aside(ticket)
        await asyncio.sleep(min(pause_s, max(0.0, self.job.deadline_at_s - now_s)))
        self._check_stays()
        self.placement.line.bring_back(ticket)

    def _check_stays(self) -> None:
        """Who has left meanwhile has given the ticket back."""
        if self._left:
            raise asyncio.CancelledError
