"""Attempts with keep_s: they outlive their callers, so that whoever comes back reads them from the beginning.

A table of a replica, by request id. An attempt that is kept has no caller but this table; callers are cursors of its
log. It goes when it fails, when its starter cancels it, or when nobody has read it for keep_s. The table is bounded:
the oldest answer that is complete and unread gives way, and where there is none a new attempt ends with its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

import structlog
from kvmesh.v1 import worker_pb2
from opentelemetry import metrics

from services.worker.attempts import Attempt, OwnAttempt
from services.worker.errors import Refused
from services.worker.kept_log import BroughtOutput, Cursor, KeptLog
from services.worker.messages import RequestFailed
from services.worker.streams import RequestStream

_log = structlog.get_logger()
_meter = metrics.get_meter("kvmesh.worker")
_num_kept = _meter.create_up_down_counter(
    "kvmesh_worker_kept_requests", description="Requests that are kept for callers that come back, running or complete."
)
_ends = _meter.create_counter(
    "kvmesh_worker_kept_ends", description="Requests that are kept no longer, or were not for want of room, by reason."
)
_attaches = _meter.create_counter(
    "kvmesh_worker_attaches", description="Callers that came back for a kept request, by outcome."
)


class KeptStreams:
    """Owner of the kept attempts of one replica."""

    def __init__(self, *, max_kept: int) -> None:
        self._max_kept = max_kept
        # In the order of their starts.
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: worker_pb2.WorkerGenerateRequest, own: OwnAttempt) -> Attempt:
        """The caller's hold on its attempt, which is kept from now on where there is room."""
        earlier = self._kept.get(request.request_id)
        if earlier is not None:
            earlier.forget("superseded")
        if not self._has_room():
            _ends.add(1, {"reason": "no_room"})
            _log.warning("an attempt is not kept: too many are", request_id=request.request_id, kept=len(self))
            return own
        kept = _Kept(request, own, partial(self._gone, request.request_id))
        self._kept[request.request_id] = kept
        _num_kept.add(1)
        return kept.read(is_starter=True)

    def attach(self, request_id: str) -> Attempt:
        """A reader from the beginning on. Raises Refused where the attempt is not kept."""
        kept = self._kept.get(request_id)
        _attaches.add(1, {"outcome": "not_kept" if kept is None else "attached"})
        if kept is None:
            raise Refused("NOT_FOUND", "the attempt is not kept here")
        return kept.read()

    def drain(self) -> None:
        """Keep nothing that nobody reads: whoever comes back for it has it computed elsewhere."""
        for kept in list(self._kept.values()):
            kept.drain()

    def close(self) -> None:
        """Forget all of them. Idempotent."""
        for kept in list(self._kept.values()):
            kept.forget("closed")

    def _has_room(self) -> bool:
        if len(self) >= self._max_kept:
            oldest = next((kept for kept in self._kept.values() if kept.is_idle), None)
            if oldest is not None:
                oldest.forget("evicted")
        return len(self) < self._max_kept

    def _gone(self, request_id: str, reason: str) -> None:
        del self._kept[request_id]
        _num_kept.add(-1)
        _ends.add(1, {"reason": reason})


class _Kept:
    """One attempt, its log, and the time that it is kept without a reader."""

    def __init__(
        self, request: worker_pb2.WorkerGenerateRequest, own: OwnAttempt, on_gone: Callable[[str], None]
    ) -> None:
        """on_gone: told why it is kept no longer, once."""
        self.log = KeptLog()
        self.own = own
        self._keep_s = request.keep_s
        self._brought = BroughtOutput(request)
        # Said as soon as it is admitted.
        self._known = self._brought.responses(request.known)
        self._on_gone = on_gone
        self._is_gone = False
        self._expiry: asyncio.TimerHandle | None = None
        own.listen(self._listen)

    @property
    def is_idle(self) -> bool:
        """Whether its answer is complete and nobody reads it."""
        return self.log.is_over and not self.log.cursors

    def read(self, *, is_starter: bool = False) -> KeptReader:
        """One reader more."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        return KeptReader(self, self.log.open(is_starter=is_starter))

    def left(self, cursor: Cursor) -> None:
        """One reader less. Idempotent."""
        self.log.cursors.discard(cursor)
        if not self.log.cursors and not self._is_gone and self._expiry is None:
            self.log.compact()
            self._expiry = asyncio.get_running_loop().call_later(self._keep_s, self.forget, "expired")

    def drain(self) -> None:
        """End with the last reader, now or later."""
        self._keep_s = 0.0
        if not self.log.cursors:
            self.forget("drained")

    def resume(self, further: Iterable[worker_pb2.KnownOutput], *, hold: bool) -> None:
        """Its starter has heard more of another attempt; the other readers are told."""
        outputs = list(further)
        responses = self._brought.responses(outputs)
        if self.own.stream.admitted:
            self.log.say_known(responses)
        else:
            self._known += responses
        self.own.resume(outputs, hold=hold)

    def complete(self) -> None:
        """Nothing more is to be computed; what has been said is the answer."""
        if not self.log.is_over:
            self.own.leave()
            self.log.end(None)
            self.log.compact()

    def forget(self, reason: str) -> None:
        """Keep it no longer: what still runs ends for all its readers. Idempotent."""
        if self._is_gone:
            return
        self._is_gone = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._on_gone(reason)
        if not self.log.is_over:
            self.own.leave()
            self.log.end(RequestFailed(self.own.stream.key, "ABORTED", "the attempt has ended elsewhere"))

    def _listen(self) -> None:
        for response in self.own.take():
            self.log.say((response,))
            if response.HasField("admitted"):
                self.log.say_known(self._known)
            elif response.HasField("stale"):
                self._fail(None)
        if self.own.is_over and not self.log.is_over:
            if self.own.failure is not None:
                self._fail(self.own.failure)
            else:
                self.complete()

    def _fail(self, failure: RequestFailed | None) -> None:
        """There is nothing to come back for."""
        self.own.leave()
        self.log.end(failure)
        self.forget("failed")


class KeptReader:
    """One caller's hold on a kept attempt."""

    def __init__(self, kept: _Kept, cursor: Cursor) -> None:
        self._kept = kept
        self._cursor = cursor
        self.stream: RequestStream = kept.own.stream

    @property
    def is_over(self) -> bool:
        """See Attempt."""
        return self._cursor.is_over

    @property
    def has_more(self) -> bool:
        """See Attempt."""
        return self._cursor.has_more

    @property
    def failure(self) -> RequestFailed | None:
        """See Attempt."""
        return self._cursor.failure

    def listen(self, listener: Callable[[], None]) -> None:
        """See Attempt."""
        self._cursor.wake = listener

    def take(self) -> list[worker_pb2.WorkerGenerateResponse]:
        """See Attempt."""
        return self._cursor.take()

    def resume(self, further: Iterable[worker_pb2.KnownOutput], *, hold: bool) -> None:
        """See Attempt; for the starter alone, who has heard it."""
        if self._cursor.is_starter and not self._kept.log.is_over:
            self._kept.resume(further, hold=hold)

    def leave(self, *, complete: bool = False) -> None:
        """The attempt goes on; with complete of its starter it is not computed further."""
        self._kept.left(self._cursor)
        if complete and self._cursor.is_starter:
            self._kept.complete()

    def cancel(self) -> None:
        """The starter's ends the attempt; another reader only leaves."""
        self._kept.left(self._cursor)
        if self._cursor.is_starter:
            self._kept.forget("cancelled")
