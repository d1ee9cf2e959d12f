"""A request on its way through the fair line: what it wants, and where it is. Plain data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

from services.common.fair_queue import Entry, RequestClass, StarvationBound
from services.gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Most that wait, in all and of one tenant; longest wait; when a less urgent class has its turn."""

    max_waiting: int
    max_tenant_waiting: int
    max_wait_s: float
    starvation: StarvationBound


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that wants a worker. ttft_at_s: when its first token is due, inf for never. Times are monotonic."""

    model: str
    tenant: str
    request_class: RequestClass
    prompt_tokens: int
    max_tokens: int
    num_choices: int
    deadline_at_s: float
    ttft_at_s: float


class TicketState(Enum):
    """Where a ticket is; only the line changes it."""

    WAITING = auto()
    ASKING = auto()
    ASIDE = auto()
    GRANTED = auto()
    LEFT = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way to a worker. until_s: end of its wait. retry_after_s: the router's last forecast."""

    wanted: Wanted
    until_s: float
    entry: Entry[Ticket] = field(init=False)
    state: TicketState = TicketState.WAITING
    retry_after_s: float | None = None
    returns: int = 0
    refusal: GatewayError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def asks_as(self) -> RequestClass:
        """The class its turn counts as."""
        return self.entry.asks_as
