"""The real router of a simulated cluster, and all that it hears: reports and announcements, each after its delay.

Reports that say nothing new are not sent one by one: every worker that lives is heard of in one stroke.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.announcements import Header, Kind, Tier
from services.common.blocks import BlockId
from services.common.keys import location_key
from services.common.own_pauses import TICK_S
from services.common.redis_client import RedisHealth
from services.common.registry import LocationRecord
from services.router.decisions import Decisions, OpenAttempts
from services.router.domain import Ask, AttemptId, Load, Placement, Refused, WorkerId
from services.router.metrics import RouterMetrics
from services.router.placement import PlacementConfig
from services.router.policies import POLICIES, Policy
from services.router.simulator.introductions import identity_of, idle_load, links_of, record_of, step_costs_of
from services.router.simulator.job import WorkerProfile, WorkerState
from services.router.simulator.lower_tiers import TierProfile, node_name, number_of, worker_name
from services.router.simulator.worker import SimWorker

REPORT_EVERY_S = 0.1
# The router's default.
_PENDING_TIMEOUT_S = 5.0
# Digests are compared from this sequence number on, which is never: no simulated announcement is lost.
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds. hop_s: from the gateway to the router or a worker; index_s: from a block's change to the routers."""

    hop_s: float = 0.001
    report_s: float = 0.005
    index_s: float = 0.01


@dataclass(slots=True)
class _Member:
    """A worker as its router knows it. progress: reports made."""

    worker_id: WorkerId
    row: int
    reported: WorkerState | None = None
    progress: int = 0


class MeshView:
    """Decisions of one router over the workers, numbered from 0."""

    def __init__(
        self,
        config: PlacementConfig,
        profile: WorkerProfile,
        num_workers: int,
        delays: Delays,
        policies: Mapping[str, Policy] = POLICIES,
        *,
        lower_tiers: TierProfile | None = None,
    ) -> None:
        self.decisions = Decisions(
            config, RedisHealth(), RouterMetrics(), pending_timeout_s=_PENDING_TIMEOUT_S, policies=policies
        )
        self.opened: OpenAttempts = {}
        self._profile = profile
        self._delays = delays
        # Workers learn what their steps cost within seconds, and here it never changes.
        self._step_costs = step_costs_of(profile.time_model)
        self._tiers = lower_tiers
        # By location: the number of its last announcement.
        self._seqs: dict[str, int] = {}
        self._links = links_of(num_workers, lower_tiers)
        self._members = [self._join(number) for number in range(num_workers)]
        self._rows = np.array([member.row for member in self._members])
        self._alive = np.ones(num_workers, np.bool_)
        self._reports: deque[tuple[float, int, Load]] = deque()
        self._changes: deque[tuple[float, str, Sequence[tuple[BlockId, Tier]], list[BlockId]]] = deque()
        self._silent: set[str] = set()
        self._ticked_s = self._heard_s = -math.inf

    def ask(self, ask: Ask, now_s: float) -> Placement | Refused:
        """The router's answer, from what it has heard by now."""
        self.hear(now_s)
        return self.decisions.ask(ask, self.opened, now_s)

    def number_of(self, placement: Placement) -> int:
        """The worker chosen."""
        return number_of(placement.worker_id)

    def numbers(self) -> dict[int, int]:
        """Of each name's hash, as policies see it, the worker's number."""
        names = self.decisions.table.rows["name_hash"][self._rows].tolist()
        return {name: number for number, name in enumerate(names)}

    def done(
        self,
        attempt: AttemptId,
        now_s: float,
        *,
        outcome: str,
        ttft_s: float = 0.0,
        tpot_s: float = 0.0,
        output_tokens: int = 0,
    ) -> None:
        """The gateway closes an attempt."""
        self.decisions.done(
            attempt, self.opened, now_s, outcome=outcome, ttft_s=ttft_s, tpot_s=tpot_s, output_tokens=output_tokens
        )

    def report(
        self,
        number: int,
        worker: SimWorker,
        now_s: float,
        *,
        admitted: tuple[str, ...] = (),
        ended: tuple[str, ...] = (),
    ) -> None:
        """A worker speaks; without any news its words are only a sign of life."""
        member, state = self._members[number], worker.state(now_s)
        if state == member.reported and not admitted and not ended:
            return
        member.reported = state
        member.progress += 1
        load = Load(
            progress=member.progress,
            ready=True,
            draining=False,
            running_requests=state.running,
            waiting_requests=state.waiting,
            queued_prefill_tokens=state.queued_prefill_tokens,
            decoding_sequences=state.decoding,
            free_blocks=state.free_blocks,
            cached_blocks=worker.cache.idle,
            step_costs=self._step_costs,
            prefill_tokens_per_s=worker.rates.prefill_tokens_per_s,
            decode_step_s=worker.rates.decode_step_s,
            admitted=admitted,
            ended=ended,
            holders=self._links,
        )
        self._reports.append((now_s + self._delays.report_s, number, load))

    def announce(self, number: int, adds: list[BlockId], removes: list[BlockId], now_s: float) -> None:
        """Blocks that a worker holds from now on, and no more."""
        if adds or removes:
            entries = [(block_id, Tier.HBM) for block_id in adds]
            self._change(location_key("worker", worker_name(number)), entries, removes, now_s)

    def announce_node(
        self, number: int, entries: Sequence[tuple[BlockId, Tier]], removes: list[BlockId], now_s: float
    ) -> None:
        """Blocks that a kvstore node holds from now on, with their tiers, and no more."""
        if entries or removes:
            self._change(location_key("kvstore", node_name(number)), entries, removes, now_s)

    def lose(self, numbers: Sequence[int]) -> None:
        """These workers have fallen silent."""
        self._alive[list(numbers)] = False
        self._silent.update(location_key("worker", worker_name(number)) for number in numbers)

    def hear(self, now_s: float) -> None:
        """Take in what has arrived by now."""
        self._hear_life(now_s)
        table = self.decisions.table
        while self._reports and self._reports[0][0] <= now_s:
            at_s, number, load = self._reports.popleft()
            if self._alive[number]:
                table.report(self._members[number].worker_id, load, at_s)
        while self._changes and self._changes[0][0] <= now_s:
            _, location, entries, removes = self._changes.popleft()
            if location not in self._silent:
                self._apply(location, entries, removes)

    def _hear_life(self, now_s: float) -> None:
        table = self.decisions.table
        if now_s - self._heard_s >= REPORT_EVERY_S:
            table.alive(self._rows[self._alive], now_s)
            self._heard_s = now_s
        if now_s - self._ticked_s >= TICK_S:
            # Ticks that nobody saw would look like a pause of the router's own.
            table.tick(now_s - TICK_S)
            table.tick(now_s)
            self._ticked_s = now_s

    def _join(self, number: int) -> _Member:
        worker_id, table = WorkerId(worker_name(number)), self.decisions.table
        # Without an address to pull from workers share nothing.
        record = record_of("worker", worker_id, worker_id, "" if self._tiers is None else worker_id)
        row = table.add(record).row
        table.identify(worker_id, identity_of(worker_id, self._profile), 0.0)
        table.report(worker_id, idle_load(self._profile, self._links), 0.0)
        self._list(record)
        if self._tiers is not None:
            node = record_of("kvstore", node_name(number), worker_id, node_name(number))
            self.decisions.set_kvstore(node, gone=False)
            self._list(node)
        return _Member(worker_id, row)

    def _list(self, record: LocationRecord) -> None:
        """The index knows the location, which has nothing yet."""
        replica = self.decisions.replica
        replica.begin_load(record.location, record.epoch)
        replica.end_load(record.location, 0, verify_from=_NEVER)
        self.decisions.holders.changed()
        self._seqs[record.location] = 0

    def _change(
        self, location: str, entries: Sequence[tuple[BlockId, Tier]], removes: list[BlockId], now_s: float
    ) -> None:
        self._changes.append((now_s + self._delays.index_s, location, entries, removes))

    def _apply(self, location: str, entries: Sequence[tuple[BlockId, Tier]], removes: list[BlockId]) -> None:
        self._seqs[location] += 1
        header = Header(1, self._seqs[location], Kind.CHANGE, 0, 0)
        self.decisions.replica.apply(location, header, entries, removes)
