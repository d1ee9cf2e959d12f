"""News of one router for the others, in the order in which they happened."""

from __future__ import annotations

import msgspec

from services.router.domain import AttemptId, WorkerId
from services.router.gateway_queues import ModelQueue
from services.router.worker_state import PendingAttempt


class GrantedNews(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """An attempt was granted to a worker of that epoch. The receiver counts its age from the receipt."""

    worker_id: WorkerId
    epoch: int
    attempt: AttemptId
    pending: PendingAttempt


class ClosedNews(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A granted attempt was closed by its gateway."""

    worker_id: WorkerId
    attempt: AttemptId


class QueuesNews(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """What waits in one gateway now, by model. gateway: a name that its router gave to its stream."""

    gateway: str
    queues: tuple[ModelQueue, ...]


News = GrantedNews | ClosedNews | QueuesNews


class Bulletin(msgspec.Struct, frozen=True, array_like=True):
    """Some news of one router."""

    router: str
    news: list[News]
