"""How a request begins to run: prepare it, charge its tenant, start its streams, and wait until a worker has taken it.

A model that is loaded on demand is waited for. When the version of the model that it was to have lost its workers in
the meantime, it begins again with another. When no worker would meet its objectives and its tenant has a fallback
model, the request begins again with that one. Whatever has begun ends with the session.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from kvmesh.v1.common_pb2 import SamplingParams
from opentelemetry import trace

from services.common.blocks import owner_digest
from services.common.fair_queue import RequestClass
from services.gateway.adapters import base_and_adapter
from services.gateway.api.openai_parse import ReplyFormat
from services.gateway.catalog import ModelCatalog
from services.gateway.cold_starts import ColdStarts
from services.gateway.errors import AnswerNotKept, ModelLoading, ModelUnavailable, ObjectiveUnmet, TooLargeForWorkers
from services.gateway.generation import Generation
from services.gateway.grammars.checker import GrammarChecker
from services.gateway.idempotency_records import Claim
from services.gateway.keyed_requests import KeyedRequests
from services.gateway.keyed_run import KeyedRun, run_id
from services.gateway.metrics import GatewayMetrics
from services.gateway.output import Event
from services.gateway.placed_stream import PlacedStream
from services.gateway.placement import Placement
from services.gateway.placement_job import PlacementJob
from services.gateway.quotas import Charge, Quotas
from services.gateway.request import GenerationRequest, Plan, PromptPlan, Sampling
from services.gateway.session import Session
from services.gateway.tenants import ClassObjectives, Tenants
from services.gateway.text.pool import Job, ModelMissing, Prepared, TextPool
from services.gateway.tools.offered import ToolOffer
from services.gateway.versions import only, without

# A model that serves by the last report is asked for so often again when its router says that no worker can have the
# request: the report may be older. Then it is the request that no worker can have.
_MAX_RETURNS = 15
_tracer = trace.get_tracer("kvmesh.gateway")
_log = structlog.get_logger("gateway.beginning")


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that a worker has taken. events: its first. reply: the format of an OpenAI answer."""

    plan: Plan
    reply: ReplyFormat | None
    generation: Generation
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Beginner:
    """The parts that a beginning needs."""

    catalog: ModelCatalog
    pool: TextPool
    placement: Placement
    tenants: Tenants
    quotas: Quotas
    metrics: GatewayMetrics
    keyed: KeyedRequests
    grammars: GrammarChecker
    cold: ColdStarts
    block_key: bytes

    async def begin_openai(self, session: Session, endpoint: str, body: bytes) -> Begun:
        """Begin an OpenAI body. Raises GatewayError."""
        job = self._job_of(session, endpoint=endpoint, body=body)
        return await self._begin(session, job, body)

    async def begin_native(self, session: Session, request: GenerationRequest, offer: ToolOffer | None) -> Begun:
        """Begin a native request. offer: its tools. Raises GatewayError."""
        job = self._job_of(session, request=request, offer=offer)
        offered = b"" if offer is None else msgspec.msgpack.encode(offer, order="sorted")
        return await self._begin(session, job, msgspec.msgpack.encode(request, order="sorted") + offered)

    def _job_of(self, session: Session, **request: Any) -> Job:
        catalog = self.catalog
        return Job(
            views=catalog.views, adapters=catalog.adapters, aliases=catalog.aliases, tenant=session.tenant, **request
        )

    async def _begin(self, session: Session, job: Job, body: bytes) -> Begun:
        """body: tells the request from others with its idempotency key."""
        if session.idempotency_key is None:
            return await self._run_some_model(session, job)
        return await self.keyed.begin(
            session,
            body,
            run=lambda: self._run_some_model(session, job),
            attach=lambda claim: self._attach(session, job, claim),
        )

    async def _run_some_model(self, session: Session, job: Job) -> Begun:
        """With the tenant's fallback model where no worker would meet the objectives."""
        try:
            return await self._run_some_version(session, job)
        except ObjectiveUnmet:
            fallback = self.catalog.resolve(self.tenants.of(session.tenant.name).fallback_model)
            # Vectors of two models cannot be compared.
            embeds = session.plan is not None and session.plan.embeds
            if embeds or fallback in ("", session.model) or fallback not in self.catalog.views:
                raise
            _log.info("fallback", request_id=session.request_id, model=session.model, fallback=fallback)
            self.metrics.count_fallback(session.model, fallback)
            session.withdraw()
            return await self._run_some_version(session, msgspec.structs.replace(job, model=fallback))

    async def _run_some_version(self, session: Session, job: Job) -> Begun:
        """With another version of the model where the chosen one has lost its workers since the router's report."""
        returns = 0
        while True:
            try:
                return await self._run(session, job)
            except ModelLoading:
                raise
            except ModelUnavailable as error:
                plan = session.plan
                if session.generation is None or plan is None:
                    raise
                others = without(job.views, plan.model, plan.model_digest)
                # A model that is loaded anew has room for no more.
                is_final = isinstance(error, TooLargeForWorkers) or plan.model not in self.cold.models
                if others is None and (is_final or returns >= _MAX_RETURNS):
                    raise
                session.withdraw()
                if others is None:
                    has_waited = await self._wait_for(plan.model, session, has_gone=True)
                    returns = 0 if has_waited else returns + 1
                else:
                    version = self.catalog.label(plan.model, plan.model_digest)
                    _log.warning("version_fallback", request_id=session.request_id, model=plan.model, version=version)
                    self.metrics.count_version_fallback(plan.model, version)
                job = msgspec.structs.replace(job, views=others or self.catalog.views)

    async def _run(self, session: Session, job: Job) -> Begun:
        prepared = await self._prepare(session, job)
        plan = prepared.plan
        use = _Use(self.quotas, await self._charge(session, plan), plan)
        session.settle = use.settle
        if session.keyed is not None:
            use.keyed = session.keyed
            session.keyed.begin(plan.name, plan.made_with, len(plan.prompts))
        session.generation = use.generation = self._generation(plan, self._streams(session, plan))
        events = await session.generation.read()
        use.is_taken = True
        self.metrics.count_version(plan.model, self.catalog.label(plan.model, plan.model_digest))
        return Begun(plan, prepared.reply, session.generation, events)

    async def _attach(self, session: Session, job: Job, claim: Claim) -> Begun:
        """Read what workers have of an earlier request with this key. Raises AnswerNotKept."""
        base, adapter = base_and_adapter(claim.model, job.views, job.adapters)
        model_digest = claim.model_digest
        if adapter is not None:
            # Under another content of the adapter no version has what is left.
            model_digest = model_digest.removesuffix(adapter.digest)
        views = only(job.views, base, model_digest)
        if views is None:
            raise AnswerNotKept("the model of the answer is no longer served")
        prepared = await self._prepare(session, msgspec.structs.replace(job, views=views, model=claim.model))
        sampling = prepared.plan.sampling
        wants_logprobs = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
        if wants_logprobs and any(place.is_resumed for place in claim.places):
            raise AnswerNotKept("log probabilities of the answer were lost with a worker")
        streams = self._streams(session, prepared.plan)
        assert session.names is not None
        run = run_id(session.names, claim)
        try:
            for index, (stream, place) in enumerate(zip(streams, claim.places, strict=True)):
                await stream.attach(_prompt_id(run, prepared.plan, index), place)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        # A generation reads from its streams by itself.
        session.generation = self._generation(prepared.plan, streams)
        session.replay_of = run
        return Begun(prepared.plan, prepared.reply, session.generation, await session.generation.read())

    async def _prepare(self, session: Session, job: Job) -> Prepared:
        while isinstance(prepared := await self._text(session, job), str):
            await self._wait_for(prepared, session)
            job = msgspec.structs.replace(job, views=self.catalog.views)
        plan = _seeded(_offline(prepared.plan) if session.is_offline else prepared.plan, session)
        if plan.form is not None:
            await self.grammars.check(plan.form, plan.model, plan.vocab_size)
        session.plan, session.model = plan, plan.model
        session.end_user = prepared.reply.end_user if prepared.reply is not None else ""
        session.span.update_name(f"{session.api} {plan.model}")
        session.span.set_attribute("gen_ai.request.model", plan.model)
        return Prepared(plan, prepared.reply)

    async def _text(self, session: Session, job: Job) -> Prepared | str:
        """The plan of a job, or the model that is to be loaded first."""
        started_s = time.monotonic()
        try:
            with _tracer.start_as_current_span("tokenize") as span:
                prepared = await self.pool.prepare(job)
                span.set_attribute("gen_ai.usage.input_tokens", prepared.plan.prompt_tokens)
        except ModelMissing as missing:
            model = self.catalog.base(str(missing))
            if model in self.cold.models:
                return model
            self.catalog.check(str(missing))
            raise ModelUnavailable("the model has only now appeared", "model") from None
        session.prepare_s += time.monotonic() - started_s
        self.metrics.record_prepare(time.monotonic() - started_s)
        return prepared

    async def _wait_for(self, model: str, session: Session, *, has_gone: bool = False) -> bool:
        """Until a model that is loaded on demand serves; whether it had to be loaded. Raises ModelLoading."""
        session.model = model
        forecast_s = await self.cold.wait(model, session.deadline_at_s, has_gone=has_gone)
        session.cold_start_s += forecast_s
        return forecast_s > 0

    async def _charge(self, session: Session, plan: Plan) -> Charge | None:
        tenant = session.tenant.name
        policy = self.tenants.of(tenant)
        policy.class_of(plan.priority)  # a request that may not run is not charged
        outputs = self.placement.line.outputs
        expected = sum(outputs.tokens(tenant, prompt.max_tokens) for prompt in plan.prompts) * plan.num_choices
        return await self.quotas.charge(tenant, policy, plan.prompt_tokens + expected)

    def _streams(self, session: Session, plan: Plan) -> list[PlacedStream]:
        sampling = _sampling_proto(plan.sampling)
        return [
            PlacedStream(self.placement, self._job(session, plan, sampling, i, prompt))
            for i, prompt in enumerate(plan.prompts)
        ]

    def _generation(self, plan: Plan, streams: Sequence[PlacedStream]) -> Generation:
        return Generation(plan, self.catalog.texts[plan.model].vocabulary_of(plan), streams)

    def _job(
        self, session: Session, plan: Plan, sampling: SamplingParams, index: int, prompt: PromptPlan
    ) -> PlacementJob:
        policy = self.tenants.of(session.tenant.name)
        kind = policy.class_of(plan.priority)
        objectives = ClassObjectives() if session.is_offline else policy.objectives.of(kind)
        ttft_s = plan.ttft_s or objectives.ttft_s
        return PlacementJob(
            request_id=_prompt_id(session.run_id, plan, index),
            tenant=session.tenant.name,
            model=plan.model,
            model_digest=plan.model_digest,
            prompt=prompt,
            block_key=self.block_key,
            block_root=plan.block_root,
            block_tokens=plan.block_tokens,
            owner_digest=owner_digest(self.block_key, tenant=session.tenant.name, cleared=session.tenant.cleared),
            sampling=sampling,
            num_choices=plan.num_choices,
            stop_token_ids=plan.stop_token_ids,
            request_class=kind,
            deadline_at_s=session.deadline_at_s,
            ttft_at_s=session.started_s + ttft_s if ttft_s else math.inf,
            tpot_s=plan.tpot_s or objectives.tpot_s,
            traceparent=session.traceparent,
            adapter=plan.adapter,
            keeper=session.keyed.keeper(index) if session.keyed is not None else None,
            embeds=plan.embeds,
            pooling=plan.pooling,
        )


@dataclass(slots=True)
class _Use:
    """What a request was charged and what it has used.

    is_taken: a worker has taken it. keyed: its run, where that goes on when its caller leaves.
    """

    quotas: Quotas
    charge: Charge | None
    plan: Plan
    generation: Generation | None = None
    is_taken: bool = False
    keyed: KeyedRun | None = None

    def settle(self) -> None:
        """Replace the estimate; once."""
        charge, self.charge = self.charge, None
        if charge is None:
            return
        used_tokens = 0
        if self.is_taken and self.generation is not None:
            # What goes on without its caller, who is not charged again when he comes back, may produce all it is let.
            goes_on = self.keyed is not None and not (self.keyed.is_abandoned or self.generation.is_over)
            output_tokens = self.plan.most_output_tokens if goes_on else self.generation.usage().output_tokens
            used_tokens = self.plan.prompt_tokens + output_tokens
        self.quotas.settle(charge, used_tokens)


def _prompt_id(run_id: str, plan: Plan, index: int) -> str:
    """By which routers and workers know one prompt of a run."""
    return run_id if len(plan.prompts) == 1 else f"{run_id}-{index}"


def _seeded(plan: Plan, session: Session) -> Plan:
    """An unseeded request gets its seed at admission, so that every attempt draws the same; from its key, if any."""
    if plan.sampling.seed is not None:
        return plan
    seed = session.names.seed if session.names is not None else random.SystemRandom().getrandbits(64)
    return msgspec.structs.replace(plan, sampling=msgspec.structs.replace(plan.sampling, seed=seed))


def _offline(plan: Plan) -> Plan:
    """Nobody waits for it: whatever the body says, it gives way to all others."""
    return msgspec.structs.replace(plan, priority=RequestClass.BATCH, ttft_s=0.0, tpot_s=0.0)


def _sampling_proto(sampling: Sampling) -> SamplingParams:
    given: dict[str, Any] = msgspec.structs.asdict(sampling)
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
