"""Requests with an idempotency key: run once, and repeated by reading what a worker has, whichever gateway is asked.

The first of them claims its record and runs. A repeat reads the answer from its beginning at the workers that keep it,
while it is computed or when it is complete. Where they are gone, or keep it no longer, the repeat claims the record and
runs the request anew, with the same seed. Without Redis a request runs as if it had no key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from opentelemetry import metrics

from services.common.redis_client import Backoff, RedisClient
from services.gateway.errors import AnswerNotKept, DeadlineExceeded, IdempotencyKeyReused
from services.gateway.idempotency import KeyedNames, body_digest, check_key, names_of
from services.gateway.idempotency_records import Claim, IdempotencyRecords, OtherBody, RecordsLost
from services.gateway.keyed_run import KeyedRun
from services.gateway.session import Session

# Between looks at a run that no worker has taken yet.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.25
_CLOSE_S = 1.0
# For which workers go on with a line of a batch whose gateway is gone: another has taken it over by then.
_OFFLINE_KEEP_S = 30.0
T = TypeVar("T")
_requests = metrics.get_meter("kvmesh.gateway").create_counter(
    "kvmesh_gateway_keyed_requests",
    description="Requests with an idempotency key: run as new or anew, attached, refused, or run without Redis.",
)


class KeyedRequests:
    """Owner of the runs of this gateway. window_s: for which an answer can be repeated after its end."""

    def __init__(self, client: RedisClient, secret: bytes, window_s: float) -> None:
        """secret: key of the hashes that stand for keys and bodies."""
        self._window_s = window_s
        self._records = IdempotencyRecords(client, window_s)
        self._secret = secret
        self._tellers: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Runs whose record is still being written; 0 when idle."""
        return len(self._tellers)

    async def begin(
        self,
        session: Session,
        body: bytes,
        *,
        run: Callable[[], Awaitable[T]],
        attach: Callable[[Claim], Awaitable[T]],
    ) -> T:
        """Begin the session's request by one of the two, and what that gives. Raises GatewayError.

        attach: raises AnswerNotKept where it finds nothing.
        """
        key = session.idempotency_key
        assert key is not None
        check_key(key)
        names = session.names = names_of(self._secret, session.tenant.name, key)
        try:
            found = await self._claim_or_attach(session, names, body, attach)
        except RecordsLost:
            _requests.add(1, {"outcome": "unavailable"})
            return await run()
        except OtherBody:
            _requests.add(1, {"outcome": "refused"})
            raise IdempotencyKeyReused("This Idempotency-Key belongs to another request", "Idempotency-Key") from None
        if not isinstance(found, Claim):
            return found
        if session.is_closed:
            # Nobody would end the run; its lease does.
            raise asyncio.CancelledError
        self._open(session, names, found)
        return await run()

    async def close(self) -> None:
        """Give records a moment to be written, then leave them as they are."""
        if self._tellers:
            await asyncio.wait(self._tellers, timeout=_CLOSE_S)
        for task in self._tellers:
            task.cancel()

    async def _claim_or_attach(
        self, session: Session, names: KeyedNames, body: bytes, attach: Callable[[Claim], Awaitable[T]]
    ) -> Claim | T:
        digest, pause = body_digest(self._secret, session.api, body), Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
        failed: Claim | None = None
        while (life_s := session.deadline_at_s - time.monotonic()) > 0:
            claim = await self._records.claim(names.tag, digest, life_s=life_s, failed=failed)
            session.created_s = claim.at_s
            if claim.is_ours:
                _requests.add(1, {"outcome": "anew" if failed is not None else "new"})
                return claim
            if not claim.places:
                await asyncio.sleep(pause.next_s())
                continue
            try:
                begun = await attach(claim)
            except AnswerNotKept:
                session.withdraw()
                failed = claim
                continue
            _requests.add(1, {"outcome": "attached"})
            return begun
        raise DeadlineExceeded("the deadline passed before the request was placed")

    def _open(self, session: Session, names: KeyedNames, claim: Claim) -> None:
        session.keyed = KeyedRun(
            self._records,
            names,
            claim,
            keep_s=_OFFLINE_KEEP_S if session.is_offline else self._window_s,
            deadline_at_s=session.deadline_at_s,
            is_repeated=not session.is_offline,
        )
        task = asyncio.create_task(session.keyed.tell())
        self._tellers.add(task)
        task.add_done_callback(self._tellers.discard)
