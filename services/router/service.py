"""The Router service: proto to domain and back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from kvmesh.v1 import common_pb2, router_pb2, router_pb2_grpc
from opentelemetry import propagate, trace

from services.common.blocks import split_ids
from services.common.process import generated_instance
from services.router.decisions import Decided, Decisions, OpenAttempts
from services.router.domain import Ask, AttemptId, Placement, PullRun, RefusalReason, Refused, Requirements
from services.router.errors import BadAskError
from services.router.explanations import Ended
from services.router.gateway_queues import ModelQueue
from services.router.messages import kvstore_views, model_snapshot, worker_views
from services.router.models_feed import ModelsFeed
from services.router.policies import POLICIES

Context = grpc.aio.ServicerContext[Any, Any]
_tracer = trace.get_tracer("kvmesh.router")

_REASONS = {
    RefusalReason.BAD_ASK: router_pb2.REFUSAL_REASON_UNSPECIFIED,
    RefusalReason.NO_WORKER: router_pb2.REFUSAL_REASON_NO_WORKER,
    RefusalReason.OVERLOADED: router_pb2.REFUSAL_REASON_OVERLOADED,
    RefusalReason.UNKNOWN_MODEL: router_pb2.REFUSAL_REASON_UNKNOWN_MODEL,
    RefusalReason.DEADLINE: router_pb2.REFUSAL_REASON_DEADLINE,
    RefusalReason.TOO_LARGE: router_pb2.REFUSAL_REASON_TOO_LARGE,
}
_KINDS = {"worker": common_pb2.LOCATION_KIND_WORKER, "kvstore": common_pb2.LOCATION_KIND_KVSTORE}
_OUTCOMES = {
    router_pb2.OUTCOME_UNSPECIFIED: "unspecified",
    router_pb2.OUTCOME_OK: "ok",
    router_pb2.OUTCOME_CANCELLED: "cancelled",
    router_pb2.OUTCOME_WORKER_FAILED: "worker_failed",
    router_pb2.OUTCOME_STALE: "stale",
}


class RouterService(router_pb2_grpc.RouterServicer):
    """Serves gateways."""

    def __init__(self, decisions: Decisions, feed: ModelsFeed) -> None:
        self._decisions = decisions
        self._feed = feed

    async def Route(
        self, request_iterator: AsyncIterator[router_pb2.RouteRequest], context: Context
    ) -> AsyncIterator[router_pb2.RouteResponse]:
        """Answers in the order of the asks. What is open when the stream ends stays counted until reports show it."""
        opened: OpenAttempts = {}
        gateway = generated_instance("gateway")
        try:
            async for message in request_iterator:
                if message.HasField("ask"):
                    decided = self._answer(message.ask, opened)
                    answer = decided.answer if isinstance(decided, Decided) else decided
                    try:
                        yield _response(message.ask, answer)
                    finally:
                        if isinstance(decided, Decided):
                            self._decisions.note(decided)
                elif message.HasField("done"):
                    self._close(message.done, opened)
                elif message.HasField("queues"):
                    self._decisions.queues_told(gateway, _model_queues(message.queues), time.monotonic())
        finally:
            self._decisions.queues_told(gateway, (), time.monotonic())

    async def WatchModels(
        self, request: router_pb2.WatchModelsRequest, context: Context
    ) -> AsyncIterator[router_pb2.ModelSnapshot]:
        """The list of models until the caller goes."""
        async for models in self._feed.snapshots():
            yield model_snapshot(models)

    async def Describe(self, request: router_pb2.DescribeRequest, context: Context) -> router_pb2.DescribeResponse:
        """What this router knows."""
        decisions = self._decisions
        return router_pb2.DescribeResponse(
            workers=worker_views(decisions),
            kvstores=kvstore_views(decisions),
            indexed_blocks=len(decisions.replica.blocks),
            redis_connected=decisions.redis_connected,
        )

    def _answer(self, message: router_pb2.Ask, opened: OpenAttempts) -> Decided | Refused:
        """A refusal of what is no ask, else a decision that is to be noted."""
        parent = propagate.extract({"traceparent": message.traceparent}) if message.traceparent else None
        span = _tracer.start_span("route", context=parent)
        if not span.get_span_context().is_valid:
            return self._decide(message, opened)
        with trace.use_span(span, end_on_exit=True):
            decided = self._decide(message, opened)
            _describe(span, message, decided.answer if isinstance(decided, Decided) else decided)
        return decided

    def _decide(self, message: router_pb2.Ask, opened: OpenAttempts) -> Decided | Refused:
        try:
            return self._decisions.decide(ask_of(message), opened, time.monotonic())
        except BadAskError as error:
            return Refused(RefusalReason.BAD_ASK, str(error), 0.0)

    def _close(self, message: router_pb2.Done, opened: OpenAttempts) -> None:
        attempt, outcome = AttemptId(message.request_id, message.attempt), _OUTCOMES.get(message.outcome, "unspecified")
        self._decisions.done(
            attempt,
            opened,
            time.monotonic(),
            outcome=outcome,
            ttft_s=message.ttft_s,
            tpot_s=message.tpot_s,
            output_tokens=message.output_tokens,
        )
        ended = Ended(outcome, message.ttft_s, message.tpot_s, message.output_tokens)
        self._decisions.explanations.ended(attempt, ended)


def _describe(span: trace.Span, message: router_pb2.Ask, answer: Placement | Refused) -> None:
    span.set_attribute("kvmesh.request_id", message.request_id)
    span.set_attribute("kvmesh.attempt", message.attempt)
    if isinstance(answer, Refused):
        span.set_attribute("kvmesh.refusal", answer.reason.value)
        return
    span.set_attribute("kvmesh.worker_id", answer.worker_id)
    span.set_attribute("kvmesh.policy", answer.policy)
    span.set_attribute("kvmesh.predicted_ttft_s", answer.predicted_ttft_s)
    span.set_attribute("kvmesh.local_blocks", answer.local_blocks)
    span.set_attribute("kvmesh.pull_blocks", sum(run.num_blocks for run in answer.pull_plan))


def ask_of(message: router_pb2.Ask) -> Ask:
    """The domain's form of an ask. Raises BadAskError."""
    try:
        block_ids = split_ids(message.block_ids)
    except ValueError as error:
        raise BadAskError(str(error)) from None
    if not message.prompt_tokens:
        raise BadAskError("a prompt without tokens")
    if message.policy and message.policy not in POLICIES:
        raise BadAskError(f"no policy is called {message.policy!r}")
    return Ask(
        id=AttemptId(message.request_id, message.attempt),
        model=message.model,
        model_digest=message.model_digest,
        block_ids=block_ids,
        prompt_tokens=message.prompt_tokens,
        max_output_tokens=message.max_output_tokens,
        num_choices=message.num_choices,
        deadline_s=message.deadline_s,
        excluded_workers=frozenset(message.excluded_workers),
        policy=message.policy,
        priority=message.priority,
        ttft_objective_s=max(0.0, message.objectives.ttft_s),
        tpot_objective_s=max(0.0, message.objectives.tpot_s),
        requires=_requirements(message.requires),
        resumes=message.resumes,
        can_hand_off=message.can_hand_off,
        knows_too_large=message.knows_too_large,
        further_tokens=message.further_tokens,
        needs_room_now=message.needs_room_now,
    )


def _requirements(message: router_pb2.Requirements) -> Requirements:
    return Requirements(
        dtype=message.dtype,
        device=message.device,
        adapter=message.adapter_digest,
        adapter_rank=message.adapter_rank,
        protocol=message.protocol,
        pooling=message.pooling,
    )


def _model_queues(message: router_pb2.QueueReport) -> tuple[ModelQueue, ...]:
    return tuple(ModelQueue(one.model, one.requests, one.prompt_tokens) for one in message.waiting)


def _response(message: router_pb2.Ask, answer: Placement | Refused) -> router_pb2.RouteResponse:
    if isinstance(answer, Refused):
        return router_pb2.RouteResponse(refusal=_refusal(message, answer))
    return router_pb2.RouteResponse(grant=_grant(message, answer))


def _grant(message: router_pb2.Ask, placement: Placement) -> router_pb2.Grant:
    return router_pb2.Grant(
        request_id=message.request_id,
        attempt=message.attempt,
        worker_id=placement.worker_id,
        worker_epoch=placement.worker_epoch,
        worker_address=placement.worker_address,
        pull_plan=[_pull_step(run) for run in placement.pull_plan],
        local_blocks=placement.local_blocks,
        predicted_ttft_s=placement.predicted_ttft_s,
        predicted_tpot_s=(placement.handoff or placement).predicted_tpot_s,
        policy=placement.policy,
        handoff=None if placement.handoff is None else _handoff(message, placement.handoff),
    )


def _handoff(message: router_pb2.Ask, second: Placement) -> router_pb2.Handoff:
    return router_pb2.Handoff(
        attempt=AttemptId(message.request_id, message.attempt).handoff.attempt,
        worker_id=second.worker_id,
        worker_epoch=second.worker_epoch,
        worker_address=second.worker_address,
        pull_plan=[_pull_step(run) for run in second.pull_plan],
        local_blocks=second.local_blocks,
        predicted_s=second.predicted_ttft_s,
    )


def _pull_step(run: PullRun) -> common_pb2.PullStep:
    return common_pb2.PullStep(
        kind=_KINDS[run.kind],
        location_id=run.location_id,
        epoch=run.epoch,
        pull_address=run.pull_address,
        grpc_address=run.grpc_address,
        first_block=run.first_block,
        num_blocks=run.num_blocks,
        num_ssd_blocks=run.num_ssd_blocks,
        wait_s=run.wait_s,
    )


def _refusal(message: router_pb2.Ask, refused: Refused) -> router_pb2.Refusal:
    return router_pb2.Refusal(
        request_id=message.request_id,
        attempt=message.attempt,
        reason=_REASONS[refused.reason],
        detail=refused.detail,
        retry_after_s=refused.retry_after_s,
        room_in_s=refused.room_in_s,
    )
