"""The core that both APIs share: open a session, prepare a request, start its generation. No wire formats here."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from kvmesh.v1.common_pb2 import SamplingParams
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext
from structlog.contextvars import bind_contextvars

from services.common.blocks import owner_digest
from services.common.rpc import REQUEST_ID_METADATA
from services.gateway.admission import Admission
from services.gateway.catalog import ModelCatalog
from services.gateway.errors import GatewayError, InvalidRequest, ModelUnavailable, shape_of
from services.gateway.generation import Generation
from services.gateway.keys import KeyRing
from services.gateway.metrics import GatewayMetrics
from services.gateway.placed_stream import PlacedStream, Placement, PlacementJob
from services.gateway.planning import Tenant
from services.gateway.request import GenerationRequest, Plan, Sampling
from services.gateway.session import OK, Session
from services.gateway.tenant_generations import TenantGenerations
from services.gateway.text.pool import Job, ModelMissing, Prepared, TextPool

_MAX_REQUEST_ID = 128
_MAX_DEADLINE_S = 86_400.0
_tracer = trace.get_tracer("kvmesh.gateway")
_log = structlog.get_logger("gateway.core")


@dataclass(slots=True)
class Core:
    """Wiring of the parts; `inflight_ids` are the request ids in use."""

    keys: KeyRing
    generations: TenantGenerations
    catalog: ModelCatalog
    pool: TextPool
    admission: Admission
    placement: Placement
    metrics: GatewayMetrics
    block_key: bytes
    default_deadline_s: float
    inflight_ids: set[str] = field(default_factory=set)

    def tenant(self, metadata: Mapping[str, str]) -> Tenant:
        """Who calls. Raises AuthenticationFailed."""
        now_s = time.monotonic()
        tenant = self.keys.tenant_of(metadata.get("authorization", ""), now_s)
        return msgspec.structs.replace(tenant, cleared=self.generations.of(tenant.name, now_s))

    def open(
        self, api: str, metadata: Mapping[str, str], time_remaining_s: float | None, wanted_id: str = ""
    ) -> Session:
        """Authenticate and admit a request. Its span becomes current. Raises GatewayError, counted and logged."""
        with _tracer.start_as_current_span("admit"):
            tenant = self._admit(api, metadata)
        request_id = self._claim_id(wanted_id or metadata.get(REQUEST_ID_METADATA, ""))
        span = _request_span(api, request_id)
        # Each RPC runs in a task of its own, so what is attached here ends with the call.
        otel_context.attach(trace.set_span_in_context(span))
        bind_contextvars(request_id=request_id)
        carrier: dict[str, str] = {}
        propagate.inject(carrier)

        def release() -> None:
            self.admission.leave(tenant.name)
            self.inflight_ids.discard(request_id)

        return Session(
            api=api,
            request_id=request_id,
            tenant=tenant,
            deadline_at_s=time.monotonic() + self._life_s(time_remaining_s),
            span=span,
            traceparent=carrier.get("traceparent", ""),
            metrics=self.metrics,
            release=release,
        )

    @contextmanager
    def place(self, api: str, metadata: Mapping[str, str]) -> Iterator[None]:
        """A place among the requests in flight, for a call that needs no worker. Raises GatewayError."""
        tenant = self._admit(api, metadata)
        code, name = OK, ""
        try:
            yield
        except Exception as error:
            code = shape_of(error).status if isinstance(error, GatewayError) else "INTERNAL"
            name = type(error).__name__
            raise
        finally:
            self.admission.leave(tenant.name)
            self.metrics.record_request(api=api, model="", code=code, error=name)

    def _admit(self, api: str, metadata: Mapping[str, str]) -> Tenant:
        """Who calls, with a place taken for it."""
        try:
            tenant = self.tenant(metadata)
            self.admission.enter(tenant.name)
        except GatewayError as error:
            code, name = shape_of(error).status, type(error).__name__
            self.metrics.record_request(api=api, model="", code=code, error=name)
            _log.info("refused", api=api, code=code, error=name, inflight=self.admission.total)
            raise
        return tenant

    async def prepare_openai(self, session: Session, endpoint: str, body: bytes) -> Prepared:
        """Parse and plan an OpenAI body. Raises GatewayError."""
        return await self._prepare(session, endpoint=endpoint, body=body)

    async def prepare_native(self, session: Session, request: GenerationRequest) -> Prepared:
        """Plan a native request. Raises GatewayError."""
        return await self._prepare(session, request=request)

    def start(self, session: Session, plan: Plan) -> Generation:
        """Begin to run a plan; ends with the session."""
        text = self.catalog.text_model(plan.model)
        sampling = _sampling_proto(plan.sampling)
        owner = owner_digest(self.block_key, tenant=session.tenant.name, cleared=session.tenant.cleared)
        streams = [
            PlacedStream(
                self.placement,
                PlacementJob(
                    request_id=session.request_id if len(plan.prompts) == 1 else f"{session.request_id}-{i}",
                    tenant=session.tenant.name,
                    model=plan.model,
                    model_digest=plan.model_digest,
                    prompt=prompt,
                    block_root=plan.block_root,
                    owner_digest=owner,
                    sampling=sampling,
                    num_choices=plan.num_choices,
                    stop_token_ids=plan.stop_token_ids,
                    priority=plan.priority,
                    deadline_at_s=session.deadline_at_s,
                    traceparent=session.traceparent,
                ),
            )
            for i, prompt in enumerate(plan.prompts)
        ]
        session.generation = Generation(plan, text.vocabulary, streams)
        return session.generation

    async def _prepare(
        self, session: Session, *, endpoint: str = "", body: bytes | None = None,
        request: GenerationRequest | None = None,
    ) -> Prepared:  # fmt: skip
        job = Job(views=self.catalog.views, tenant=session.tenant, endpoint=endpoint, body=body, request=request)
        started_s = time.monotonic()
        with _tracer.start_as_current_span("tokenize") as span:
            prepared = await self._run(job)
            span.set_attribute("gen_ai.usage.input_tokens", prepared.plan.prompt_tokens)
        session.prepare_s = time.monotonic() - started_s
        self.metrics.record_prepare(session.prepare_s)
        plan = _seeded(prepared.plan)
        session.plan, session.model = plan, plan.model
        session.end_user = prepared.reply.end_user if prepared.reply is not None else ""
        session.span.update_name(f"{session.api} {plan.model}")
        session.span.set_attribute("gen_ai.request.model", plan.model)
        return Prepared(plan, prepared.reply)

    async def _run(self, job: Job) -> Prepared:
        try:
            return await self.pool.prepare(job)
        except ModelMissing as missing:
            self.catalog.check(str(missing))
            raise ModelUnavailable("the model has only now appeared", "model") from None

    def _life_s(self, time_remaining_s: float | None) -> float:
        if time_remaining_s is None or not math.isfinite(time_remaining_s) or time_remaining_s > _MAX_DEADLINE_S:
            return self.default_deadline_s
        return time_remaining_s

    def _claim_id(self, wanted: str) -> str:
        """The caller's id where it is usable and not in flight already, else one like it or a fresh one."""
        request_id = wanted if wanted and _is_request_id(wanted) else uuid.uuid4().hex
        if request_id in self.inflight_ids:
            request_id = f"{request_id[: _MAX_REQUEST_ID - 9]}-{uuid.uuid4().hex[:8]}"
        self.inflight_ids.add(request_id)
        return request_id


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest for an id that the native API does not allow."""
    if not _is_request_id(request_id):
        raise InvalidRequest(f"request_id must be at most {_MAX_REQUEST_ID} printable ASCII characters", "request_id")


def _is_request_id(text: str) -> bool:
    return len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable()


def _request_span(api: str, request_id: str) -> Span:
    """The request's span. Without a tracer and a caller's trace it records nothing, yet has ids to join logs by."""
    span = _tracer.start_span(api, attributes={"gen_ai.operation.name": api, "kvmesh.request_id": request_id})
    if span.get_span_context().is_valid:
        return span
    ids = SpanContext(random.getrandbits(128) or 1, random.getrandbits(64) or 1, is_remote=False)
    return NonRecordingSpan(ids)


def _seeded(plan: Plan) -> Plan:
    """An unseeded request gets its seed at admission, so that every attempt draws the same."""
    if plan.sampling.seed is not None:
        return plan
    return msgspec.structs.replace(
        plan, sampling=msgspec.structs.replace(plan.sampling, seed=random.SystemRandom().getrandbits(64))
    )


def _sampling_proto(sampling: Sampling) -> SamplingParams:
    given: dict[str, Any] = msgspec.structs.asdict(sampling)
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
