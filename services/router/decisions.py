"""Answers asks and keeps the books of the attempts it granted. Synchronous; time comes in as an argument."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import structlog

from services.common.fair_queue import RequestClass
from services.common.redis_client import RedisHealth
from services.common.registry import LocationRecord
from services.router.domain import Ask, AttemptId, Placement, Prediction, RefusalReason, Refused, WorkerId
from services.router.explanations import Candidates, Explanations
from services.router.gateway_queues import GatewayQueues, ModelQueue
from services.router.holders import Holders
from services.router.index.replica import Replica
from services.router.metrics import RouterMetrics
from services.router.news.intake import take_in
from services.router.news.messages import ClosedNews, GrantedNews, News, QueuesNews
from services.router.news.outbox import NewsOutbox
from services.router.placement import PlacementConfig, Placer
from services.router.policies import POLICIES, Policy
from services.router.pools import Pools
from services.router.scaling import ScalingConfig
from services.router.worker_state import PendingAttempt
from services.router.workers import WorkerTable

# Open attempts of one gateway; beyond it the oldest is forgotten and counted.
MAX_OPEN_ATTEMPTS = 65_536
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """A grant that its gateway has not closed yet. is_patient: of batch work, whose prompt waits for all others'."""

    worker_id: WorkerId
    policy: str
    prediction: Prediction
    num_choices: int
    model: str
    model_digest: bytes
    is_patient: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """An ask, its answer, when it came, and the seconds that it took."""

    ask: Ask
    answer: Placement | Refused
    at_s: float
    seconds: float


# Open attempts of one gateway's stream.
OpenAttempts = dict[AttemptId, OpenAttempt]


class Decisions:
    """One router's state: the view of workers, the index, the kvstores, and the policy over them."""

    def __init__(
        self,
        config: PlacementConfig,
        health: RedisHealth,
        metrics: RouterMetrics,
        *,
        pending_timeout_s: float,
        explained_requests: int = 0,
        unload_idle_s: float = 0.0,
        policies: Mapping[str, Policy] = POLICIES,
    ) -> None:
        """explained_requests: of so many the latest decisions are kept for whoever asks why.

        unload_idle_s: see scaling.ScalingConfig.
        """
        self.table = WorkerTable(pending_timeout_s=pending_timeout_s)
        self.replica = Replica()
        self.kvstores: dict[str, LocationRecord] = {}
        self.holders = Holders(self.replica, self.table, self.kvstores)
        self._placer = Placer(config, self.table, self.holders, policies)
        self.explanations = Explanations(explained_requests)
        self.gateway_queues = GatewayQueues()
        self.pools = Pools(ScalingConfig(idle_s=unload_idle_s), self.table, self.gateway_queues, self._placer)
        # What other routers are to be told.
        self.outbox = NewsOutbox()
        self._health = health
        self._metrics = metrics

    @property
    def redis_connected(self) -> bool:
        """Whether Redis answered lately."""
        return self._health.connected

    def set_kvstore(self, record: LocationRecord, *, gone: bool) -> None:
        """A kvstore has registered, changed or gone."""
        if gone:
            self.kvstores.pop(record.id, None)
        else:
            self.kvstores[record.id] = record
        self.holders.changed()

    def ask(self, ask: Ask, opened: OpenAttempts, now_s: float) -> Placement | Refused:
        """`decide` and `note` at once."""
        decided = self.decide(ask, opened, now_s)
        self.note(decided)
        return decided.answer

    def decide(self, ask: Ask, opened: OpenAttempts, now_s: float) -> Decided:
        """Decide; a grant is counted as load and entered into `opened`. The caller `note`s it once it has answered."""
        began_s = perf_counter()
        index_usable = self._health.connected or bool(self.replica.locations)
        waiting = self.gateway_queues.total(ask.model, now_s)
        answer = self._placer.place(ask, now_s, index_usable=index_usable, waiting_tokens=waiting.prompt_tokens)
        if isinstance(answer, Placement):
            self._enter(ask, ask.id, answer, opened, now_s)
            if answer.handoff is not None:
                self._enter(ask, ask.id.handoff, answer.handoff, opened, now_s)
        self._explain(ask, answer)
        return Decided(ask, answer, now_s, perf_counter() - began_s)

    def note(self, decided: Decided) -> None:
        """What is kept of a decision and no other decision looks at, so that its answer need not wait for it."""
        ask, answer = decided.ask, decided.answer
        self.pools.answered(ask, answer, decided.at_s)
        self._metrics.decided(answer, decided.seconds, priority=ask.priority)
        self.explanations.decided(ask, answer, self.table.by_row, decided.at_s)

    def done(
        self,
        attempt: AttemptId,
        opened: OpenAttempts,
        now_s: float,
        *,
        outcome: str,
        ttft_s: float = 0.0,
        tpot_s: float = 0.0,
        output_tokens: int = 0,
    ) -> None:
        """A gateway closes an attempt; unknown ones are ignored."""
        entry = opened.pop(attempt, None)
        if entry is None:
            return
        self.table.end(entry.worker_id, attempt, now_s)
        self.outbox.put(ClosedNews(entry.worker_id, attempt))
        if outcome == "ok" and output_tokens:
            self._placer.output_tokens.update(output_tokens / entry.num_choices)
        # How long batch work is put off says nothing of what others can expect.
        told_ttft_s = 0.0 if entry.is_patient else ttft_s
        self._placer.learn(entry.worker_id, entry.prediction, now_s, ttft_s=told_ttft_s, tpot_s=tpot_s)
        self._metrics.closed(entry.policy, outcome, entry.prediction, ttft_s, tpot_s)
        self._metrics.versions.closed(entry.model, entry.model_digest, outcome, ttft_s, tpot_s)
        if _explains():
            _tell_closed(attempt, entry, outcome, ttft_s=ttft_s, tpot_s=tpot_s)

    def queues_told(self, gateway: str, queues: tuple[ModelQueue, ...], now_s: float) -> None:
        """One of this router's gateways says what waits in it."""
        if queues or gateway in self.gateway_queues:
            self.outbox.put(QueuesNews(gateway, queues))
        self.gateway_queues.tell(gateway, queues, now_s)

    def take_in(self, news: News, now_s: float) -> None:
        """Another router has told something."""
        take_in(news, self.table, self.gateway_queues, now_s)
        if isinstance(news, GrantedNews):
            self.pools.granted(news.worker_id, news.pending.tokens, now_s)

    def indexed_blocks(self, location: str) -> int:
        """Blocks that the index has of a location."""
        known = self.replica.locations.get(location)
        return known.num_blocks if known else 0

    def _enter(self, ask: Ask, attempt: AttemptId, placement: Placement, opened: OpenAttempts, now_s: float) -> None:
        # The pace is a promise of whoever has most of the output.
        tpot_s = 0.0 if placement.handoff else ask.tpot_objective_s
        pending = PendingAttempt.of(placement, now_s, priority=ask.priority, tpot_s=tpot_s)
        self.table.grant(placement.worker_id, attempt, pending)
        if ask.requires.adapter:
            self.table.workers[placement.worker_id].adapters.granted(ask.requires.adapter, now_s)
        self.outbox.put(GrantedNews(placement.worker_id, placement.worker_epoch, attempt, pending))
        opened[attempt] = OpenAttempt(
            placement.worker_id,
            placement.policy,
            placement.prediction,
            max(1, ask.num_choices),
            ask.model,
            ask.model_digest,
            ask.priority >= RequestClass.BATCH,
        )
        if len(opened) > MAX_OPEN_ATTEMPTS:
            del opened[next(iter(opened))]
            self._metrics.forgotten()

    def _explain(self, ask: Ask, answer: Placement | Refused) -> None:
        if isinstance(answer, Placement) and not _explains():
            return
        fields = {
            "request_id": ask.id.request_id,
            "attempt": ask.id.attempt,
            "model": ask.model,
            "prompt_tokens": ask.prompt_tokens,
            "blocks": len(ask.block_ids),
        }
        if isinstance(answer, Refused) and answer.reason is RefusalReason.OVERLOADED:
            # The request waits in its gateway, and asks again many times a second.
            _log.debug("full", detail=answer.detail, **fields)
        elif isinstance(answer, Refused):
            _log.info("refused", reason=answer.reason.value, detail=answer.detail, **fields)
        else:
            _log.debug(
                "granted",
                worker_id=answer.worker_id,
                policy=answer.policy,
                predicted_ttft_s=round(answer.predicted_ttft_s, 6),
                local_blocks=answer.local_blocks,
                pulls=[(run.kind, run.location_id, run.first_block, run.num_blocks) for run in answer.pull_plan],
                candidates=_told(Candidates.of(answer.explanation, self.table.by_row)),
                **fields,
            )


def _explains() -> bool:
    """Whether debug lines go anywhere; building them costs more than the decision."""
    return logging.getLogger(__name__).isEnabledFor(logging.DEBUG)


def _tell_closed(attempt: AttemptId, entry: OpenAttempt, outcome: str, *, ttft_s: float, tpot_s: float) -> None:
    expected = entry.prediction
    _log.debug(
        "attempt closed",
        request_id=attempt.request_id,
        attempt=attempt.attempt,
        worker_id=entry.worker_id,
        outcome=outcome,
        predicted_ttft_s=round(expected.ttft_s, 6),
        uncorrected_ttft_s=round(expected.uncorrected_ttft_s, 6),
        actual_ttft_s=round(ttft_s, 6),
        predicted_tpot_s=round(expected.tpot_s, 6),
        actual_tpot_s=round(tpot_s, 6),
        features=[round(part, 6) for part in expected.features],
        queue_s=round(expected.queue_s, 6),
    )


def _told(candidates: Candidates) -> list[dict[str, object]]:
    """For a log line."""
    return [
        {"worker_id": worker, "score": round(score, 6), **{name: round(value, 6) for name, value in terms.items()}}
        for worker, score, terms in candidates.rows()
    ]
