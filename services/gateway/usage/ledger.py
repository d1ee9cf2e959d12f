"""What one gateway has counted and how much of it Redis knows: each count arrives there once, whatever is lost. Pure.

Counts go to Redis in numbered batches, one at a time. A batch without an answer is sent again as it was; Redis adds it
once. A Redis that has forgotten the ledger's batches gets everything that the ledger has ever counted. The whole state
fits into a file that is written before a batch is sent: a gateway started anew goes on where the last one ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from services.common.usage import Usage, UsageKey

# So that memory stays bounded whatever is asked for: beyond it the oldest days that Redis has been told of are told no
# more, and where there are none new rows are counted under one name.
MAX_ROWS = 20_000
OTHER = "(other)"
Rows = dict[UsageKey, Usage]


class Batch(msgspec.Struct, frozen=True):
    """Amounts to add. is_whole: they are all that the ledger has counted."""

    number: int
    rows: list[tuple[UsageKey, Usage]]
    is_whole: bool


class WaitingRun(msgspec.Struct, frozen=True):
    """A request with an idempotency key that has ended. question: names the one to Redis how much of it is new."""

    run: str
    question: str
    key: UsageKey
    usage: Usage


class LedgerState(msgspec.Struct):
    """What is kept of a ledger. fresh: of the total what is in no batch yet. is_known: Redis has had a batch.

    runs: that wait to be counted, in order.
    """

    id: str
    number: int = 0
    is_known: bool = False
    total: list[tuple[UsageKey, Usage]] = []
    fresh: list[tuple[UsageKey, Usage]] = []
    batch: Batch | None = None
    runs: list[WaitingRun] = []


class UsageLedger:
    """Owner of the counts of one gateway. revision: raised by every change."""

    def __init__(self, state: LedgerState) -> None:
        self.id = state.id
        self.revision = 0
        self._number = state.number
        self._is_known = state.is_known
        self._total: Rows = dict(state.total)
        self._fresh: Rows = dict(state.fresh)
        self._batch = state.batch
        self._runs = deque(state.runs)

    @property
    def state(self) -> LedgerState:
        """For a file."""
        total, fresh = list(self._total.items()), list(self._fresh.items())
        return LedgerState(self.id, self._number, self._is_known, total, fresh, self._batch, list(self._runs))

    @property
    def num_runs(self) -> int:
        """Runs that wait to be counted."""
        return len(self._runs)

    @property
    def first_run(self) -> WaitingRun | None:
        """The one of them that is counted next."""
        return self._runs[0] if self._runs else None

    def put_off(self, run: WaitingRun) -> None:
        """One more waits."""
        self._runs.append(run)
        self.revision += 1

    def take_run(self) -> WaitingRun:
        """The first waits no longer: the caller counts it."""
        self.revision += 1
        return self._runs.popleft()

    @property
    def untold(self) -> Usage:
        """What Redis has not answered for."""
        sent = [usage for _, usage in self._batch.rows] if self._batch is not None else []
        return sum((*self._fresh.values(), *sent), Usage())

    def add(self, key: UsageKey, usage: Usage) -> None:
        """Something has been used."""
        if key not in self._total and not self._has_room_for(key.day):
            key = UsageKey(key.day, OTHER, OTHER)
        for rows in (self._total, self._fresh):
            rows[key] = rows.get(key, Usage()) + usage
        self.revision += 1

    def batch(self) -> Batch | None:
        """What is to be sent now: the one that is under way, else what is new. None where Redis knows everything."""
        if self._batch is None and self._fresh:
            self._number += 1
            self._batch = Batch(self._number, list(self._fresh.items()), is_whole=not self._is_known)
            self._fresh = {}
            self.revision += 1
        return self._batch

    def arrived(self) -> None:
        """Redis has the batch."""
        self._batch, self._is_known = None, True
        self.revision += 1

    def forgotten(self) -> None:
        """Redis knows no earlier batch: the next one is all there is."""
        self._batch, self._is_known, self._fresh = None, False, dict(self._total)
        self.revision += 1

    def drop_before(self, day: str) -> None:
        """Redis keeps earlier days no longer, so they need not be told again."""
        self._drop([key for key in self._total if key.day < day and key not in self._fresh])

    def _has_room_for(self, day: str) -> bool:
        """Whether one more row of a day may be kept, be it for rows of the oldest day before it."""
        if len(self._total) < MAX_ROWS:
            return True
        sent = self._batch.rows if self._batch is not None else []
        untold = {*self._fresh, *(key for key, _ in sent)}
        told = [key for key in self._total if key.day < day and key not in untold]
        oldest = min((key.day for key in told), default="")
        self._drop([key for key in told if key.day == oldest])
        return bool(told)

    def _drop(self, keys: Iterable[UsageKey]) -> None:
        for key in keys:
            del self._total[key]
