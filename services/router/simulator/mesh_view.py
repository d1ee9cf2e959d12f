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
from services.common.redis_client import RedisHealth
from services.common.registry import LocationRecord
from services.common.step_costs import StepCosts
from services.common.time_model import TimeModel
from services.router.decisions import Decisions, OpenAttempts
from services.router.domain import Ask, AttemptId, Identity, Load, Placement, Refused, WorkerId
from services.router.metrics import RouterMetrics
from services.router.own_pauses import TICK_S
from services.router.placement import PlacementConfig
from services.router.policies import POLICIES, Policy
from services.router.simulator.job import WorkerProfile, WorkerState
from services.router.simulator.worker import SimWorker

MODEL = "simulated"
MODEL_DIGEST = b"simulated model."
REPORT_EVERY_S = 0.1
# The router's default.
_PENDING_TIMEOUT_S = 5.0
# Keys and values of an 8-billion-parameter model with grouped queries (32 layers, 8 heads of 128, two bytes).
KV_BYTES_PER_TOKEN = 131_072
_CONTEXT_TOKENS = 1 << 20
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
    """A worker as its router knows it. moved: its steps when it last reported."""

    worker_id: WorkerId
    row: int
    seq: int = 0
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
    ) -> None:
        self.decisions = Decisions(
            config, RedisHealth(), RouterMetrics(), pending_timeout_s=_PENDING_TIMEOUT_S, policies=policies
        )
        self.opened: OpenAttempts = {}
        self._profile = profile
        self._delays = delays
        # Workers learn what their steps cost within seconds, and here it never changes.
        self._step_costs = step_costs_of(profile.time_model)
        self._members = [self._join(number) for number in range(num_workers)]
        self._numbers = {member.worker_id: number for number, member in enumerate(self._members)}
        self._rows = np.array([member.row for member in self._members])
        self._alive = np.ones(num_workers, np.bool_)
        self._reports: deque[tuple[float, int, Load]] = deque()
        self._changes: deque[tuple[float, int, list[BlockId], list[BlockId]]] = deque()
        self._ticked_s = self._heard_s = -math.inf

    def ask(self, ask: Ask, now_s: float) -> Placement | Refused:
        """The router's answer, from what it has heard by now."""
        self.hear(now_s)
        return self.decisions.ask(ask, self.opened, now_s)

    def number_of(self, placement: Placement) -> int:
        """The worker chosen."""
        return self._numbers[placement.worker_id]

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
        )
        self._reports.append((now_s + self._delays.report_s, number, load))

    def announce(self, number: int, adds: list[BlockId], removes: list[BlockId], now_s: float) -> None:
        """Blocks that a worker holds from now on, and no more."""
        if adds or removes:
            self._changes.append((now_s + self._delays.index_s, number, adds, removes))

    def lose(self, numbers: Sequence[int]) -> None:
        """These workers have fallen silent."""
        self._alive[list(numbers)] = False

    def hear(self, now_s: float) -> None:
        """Take in what has arrived by now."""
        self._hear_life(now_s)
        table = self.decisions.table
        while self._reports and self._reports[0][0] <= now_s:
            at_s, number, load = self._reports.popleft()
            if self._alive[number]:
                table.report(self._members[number].worker_id, load, at_s)
        while self._changes and self._changes[0][0] <= now_s:
            _, number, adds, removes = self._changes.popleft()
            if self._alive[number]:
                self._apply(self._members[number], adds, removes)

    def _hear_life(self, now_s: float) -> None:
        table = self.decisions.table
        if now_s - self._heard_s >= REPORT_EVERY_S:
            alive = self._rows[self._alive]
            table.rows["reported_s"][alive] = now_s
            table.rows["moved_s"][alive] = now_s
            self._heard_s = now_s
        if now_s - self._ticked_s >= TICK_S:
            # Ticks that nobody saw would look like a pause of the router's own.
            table.tick(now_s - TICK_S)
            table.tick(now_s)
            self._ticked_s = now_s

    def _join(self, number: int) -> _Member:
        worker_id, table = WorkerId(f"w{number}"), self.decisions.table
        # Without an address to pull from: simulated workers share nothing.
        record = LocationRecord(kind="worker", id=worker_id, epoch=1, host=worker_id, grpc_address=worker_id)
        row = table.add(record).row
        table.identify(worker_id, identity_of(worker_id, self._profile), 0.0)
        table.report(worker_id, _idle(self._profile), 0.0)
        replica = self.decisions.replica
        replica.begin_load(record.location, record.epoch)
        replica.end_load(record.location, 0, verify_from=_NEVER)
        self.decisions.holders.changed()
        return _Member(worker_id, row)

    def _apply(self, member: _Member, adds: list[BlockId], removes: list[BlockId]) -> None:
        member.seq += 1
        header = Header(1, member.seq, Kind.CHANGE, 0, 0)
        entries = [(block_id, int(Tier.HBM)) for block_id in adds]
        self.decisions.replica.apply(f"worker/{member.worker_id}", header, entries, removes)


def step_costs_of(model: TimeModel) -> StepCosts:
    """What such a worker learns of its steps."""
    return StepCosts(
        fixed_s=0.0,
        decoding_s=model.decode_step_s,
        prefill_token_s=1.0 / model.prefill_tokens_per_s,
        prefill_pair_s=0.0,
        decode_sequence_s=model.decode_sequence_s,
        context_token_s=model.context_s,
    )


def identity_of(worker_id: WorkerId, profile: WorkerProfile) -> Identity:
    """What such a worker says of itself."""
    return Identity(
        worker_id=worker_id,
        epoch=1,
        model=MODEL,
        model_digest=MODEL_DIGEST,
        context_length=_CONTEXT_TOKENS,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        weight_format="none",
        block_tokens=profile.block_tokens,
        layout_version=1,
        vocab_size=1,
        tokenizer_digest=b"",
        total_blocks=profile.num_blocks,
        block_bytes=profile.block_tokens * KV_BYTES_PER_TOKEN,
        prefill_tokens_per_s=profile.time_model.prefill_tokens_per_s,
        decode_step_s=profile.time_model.step_s(0, 1),
        step_token_budget=profile.step_token_budget,
        max_running_requests=profile.max_running,
    )


def _idle(profile: WorkerProfile) -> Load:
    return Load(
        progress=0,
        ready=True,
        draining=False,
        running_requests=0,
        waiting_requests=0,
        queued_prefill_tokens=0,
        decoding_sequences=0,
        free_blocks=profile.num_blocks,
    )
