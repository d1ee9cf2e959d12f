"""One run of a request with an idempotency key, from its claim to its end, and what its record is told of it.

`tell` runs beside the request, which never waits for it. It writes the whole of what is known whenever that changes,
and renews the lease until workers have every prompt; what Redis missed it is told with the next write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import structlog
from kvmesh.v1.router_pb2 import Grant

from services.gateway.idempotency import KeyedNames
from services.gateway.idempotency_records import (
    LEASE_S,
    Claim,
    IdempotencyRecords,
    Place,
    RecordsLost,
    begun_fields,
    place_fields,
)

_RENEWALS_PER_LEASE = 3
# A write that Redis has missed is tried again after this, and the last one so many times.
_RETRY_S = 1.0
_LAST_TRIES = 5
_log = structlog.get_logger("gateway.idempotency")


@dataclass(frozen=True, slots=True)
class PromptKeeper:
    """Has the workers keep one prompt of a run."""

    run: KeyedRun
    index: int
    keep_s: float

    @property
    def is_abandoned(self) -> bool:
        """See placement_job.Keeper."""
        return self.run.is_abandoned

    def placed(self, grant: Grant, attempt: int, *, is_resumed: bool) -> None:
        """See placement_job.Keeper."""
        self.run.placed(self.index, Place(grant.worker_address, grant.worker_id, attempt, is_resumed))


def run_id(names: KeyedNames, claim: Claim) -> str:
    """By which workers and routers know a run; no other run, of this key or another, has it."""
    return f"{names.answer_id}-{claim.run}"


class KeyedRun:
    """State of the run. run_id: see the function of this name. is_abandoned: nobody will come back for it."""

    def __init__(
        self,
        records: IdempotencyRecords,
        names: KeyedNames,
        claim: Claim,
        *,
        keep_s: float,
        deadline_at_s: float,
        is_repeated: bool = True,
    ) -> None:
        """keep_s: for which workers keep its attempts without a reader. deadline_at_s: of the request, monotonic.

        is_repeated: False where its caller writes down a complete answer, and never asks for that again.
        """
        self.run_id = run_id(names, claim)
        self._records = records
        self._tag = names.tag
        self._run = claim.run
        self._keep_s = keep_s
        self._deadline_at_s = deadline_at_s
        self._is_repeated = is_repeated
        self.is_abandoned = False
        self._model, self._model_digest, self._num_prompts = "", b"", 0
        self._places: dict[int, Place] = {}
        self._revision = 0
        self._changed = asyncio.Event()
        # None while it runs; then whether its answer can be had again.
        self._is_kept: bool | None = None

    @property
    def is_taken(self) -> bool:
        """Whether workers have every prompt."""
        return 0 < self._num_prompts == len(self._places)

    def begin(self, model: str, model_digest: bytes, num_prompts: int) -> None:
        """The request is being placed; once more when another model or version is tried."""
        self._model, self._model_digest, self._num_prompts = model, model_digest, num_prompts
        self._places.clear()
        self._changed.set()

    def keeper(self, index: int) -> PromptKeeper:
        """Of one prompt."""
        return PromptKeeper(self, index, self._keep_s)

    def placed(self, index: int, place: Place) -> None:
        """A worker has a prompt, or has taken it over."""
        self._places[index] = place
        self._revision += 1
        self._changed.set()

    def end(self, *, is_complete: bool, is_failed: bool) -> None:
        """The request has ended for its caller. It can be repeated unless it has failed, or was on no worker yet."""
        if is_complete:
            self._is_kept = self._is_repeated
        else:
            self._is_kept = self.is_taken and not is_failed and not self.is_abandoned
        if is_complete:
            self._deadline_at_s = time.monotonic()
        self._changed.set()

    async def tell(self) -> None:
        """Keep the record, until the run has ended, is past its deadline, or another has taken its place."""
        while self._is_kept is None and (left_s := self._deadline_at_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if self.is_taken else min(left_s, LEASE_S / _RENEWALS_PER_LEASE)):
                    await self._changed.wait()
            self._changed.clear()
            if self._is_kept is None and not await self._write_or_pause():
                return
        for _ in range(_LAST_TRIES):
            with contextlib.suppress(RecordsLost):
                await self._write_last()
                return
            await asyncio.sleep(_RETRY_S)
        _log.warning("run_untold", run_id=self.run_id)

    async def _write_or_pause(self) -> bool:
        """False when the record is another run's."""
        try:
            is_ours = await self._write()
        except RecordsLost:
            self._changed.set()
            await asyncio.sleep(_RETRY_S)
            return True
        if not is_ours:
            _log.warning("run_superseded", run_id=self.run_id)
        return is_ours

    async def _write_last(self) -> None:
        if self._is_kept:
            await self._write()
        else:
            await self._records.forget(self._tag, self._run)

    async def _write(self) -> bool:
        fields: dict[str, str] = {}
        if self._num_prompts:
            fields |= begun_fields(self._model, self._model_digest, self._num_prompts)
            fields |= place_fields(self._places, self._num_prompts, self._revision)
        life_s = max(0.0, self._deadline_at_s - time.monotonic())
        return await self._records.note(self._tag, self._run, fields, life_s=life_s)
