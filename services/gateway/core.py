"""The core that both APIs share: who calls, a place among the requests in flight, a session. No wire formats here."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import structlog
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext
from structlog.contextvars import bind_contextvars

from services.common.rpc import REQUEST_ID_METADATA
from services.gateway.admission import Admission
from services.gateway.beginning import Beginner
from services.gateway.catalog import ModelCatalog
from services.gateway.cold_starts import ColdStarts
from services.gateway.errors import GatewayError, InvalidRequest, RequestIdInUse, shape_of
from services.gateway.idempotency import KEY_METADATA
from services.gateway.keys import KeyRing
from services.gateway.metrics import GatewayMetrics
from services.gateway.model_listing import ModelListing
from services.gateway.placement import Placement
from services.gateway.planning import Tenant
from services.gateway.session import OK, Session
from services.gateway.tenant_generations import TenantGenerations
from services.gateway.tenants import Tenants
from services.gateway.text.pool import TextPool
from services.gateway.usage.book import UsageBook

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
    cold: ColdStarts
    pool: TextPool
    admission: Admission
    placement: Placement
    tenants: Tenants
    beginner: Beginner
    metrics: GatewayMetrics
    usage: UsageBook
    default_deadline_s: float
    inflight_ids: set[str] = field(default_factory=set)

    def tenant(self, metadata: Mapping[str, str]) -> Tenant:
        """Who calls. Raises AuthenticationFailed."""
        return self._as_known(self.keys.tenant_of(metadata.get("authorization", ""), time.monotonic()))

    def open(
        self, api: str, metadata: Mapping[str, str], time_remaining_s: float | None, wanted_id: str = ""
    ) -> Session:
        """Authenticate and admit a request. Its span becomes current. Raises GatewayError, counted and logged.

        wanted_id: the id that the request itself brings, if any.
        """
        with _tracer.start_as_current_span("admit"):
            tenant = self._admit(api, metadata)
        request_id = self._claim_id_or_leave(api, tenant, wanted_id, metadata)
        return self._session(api, tenant, request_id, self._life_s(time_remaining_s), metadata.get(KEY_METADATA))

    def open_offline(self, api: str, tenant: Tenant, key: str) -> Session:
        """Admit a line of a batch. Its span becomes current. Raises GatewayError, counted and logged.

        tenant: who was authenticated when the batch came. key: idempotency key of the line.
        """
        try:
            self.admission.enter(tenant.name)
        except GatewayError as error:
            self._note_refusal(api, error)
            raise
        session = self._session(api, self._as_known(tenant), self._claim_id("", {}), self.default_deadline_s, key)
        session.is_offline = True
        return session

    def _session(self, api: str, tenant: Tenant, request_id: str, life_s: float, key: str | None) -> Session:
        """Of a request that has a place among those in flight."""
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
            deadline_at_s=time.monotonic() + life_s,
            span=span,
            traceparent=carrier.get("traceparent", ""),
            metrics=self.metrics,
            usage=self.usage,
            release=release,
            idempotency_key=key,
        )

    @property
    def listing(self) -> ModelListing:
        """The models as clients are told of them."""
        return ModelListing(self.catalog, self.cold)

    @contextmanager
    def place(self, api: str, metadata: Mapping[str, str]) -> Iterator[Tenant]:
        """A place among the requests in flight, for a call that needs no worker: who calls. Raises GatewayError."""
        tenant = self._admit(api, metadata)
        code, name = OK, ""
        try:
            yield tenant
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
            self._note_refusal(api, error)
            raise
        return tenant

    def _as_known(self, tenant: Tenant) -> Tenant:
        """With what the mesh knows of the tenant now."""
        now_s = time.monotonic()
        self.tenants.refresh(now_s)
        return msgspec.structs.replace(
            tenant,
            cleared=self.generations.of(tenant.name, now_s),
            context_tokens=self.tenants.of(tenant.name).context_tokens or 0,
        )

    def _note_refusal(self, api: str, error: GatewayError) -> None:
        code, name = shape_of(error).status, type(error).__name__
        self.metrics.record_request(api=api, model="", code=code, error=name)
        _log.info("refused", api=api, code=code, error=name, inflight=self.admission.total)

    def _life_s(self, time_remaining_s: float | None) -> float:
        if time_remaining_s is None or not math.isfinite(time_remaining_s) or time_remaining_s > _MAX_DEADLINE_S:
            return self.default_deadline_s
        return time_remaining_s

    def _claim_id_or_leave(self, api: str, tenant: Tenant, wanted_id: str, metadata: Mapping[str, str]) -> str:
        """Raises RequestIdInUse, the place among those in flight given back."""
        try:
            return self._claim_id(wanted_id, metadata)
        except RequestIdInUse as error:
            self.admission.leave(tenant.name)
            self._note_refusal(api, error)
            raise

    def _claim_id(self, wanted_id: str, metadata: Mapping[str, str]) -> str:
        """The caller's id where it is usable and not in flight already, else one like it or a fresh one.

        An id that the request itself brings is refused while it is in flight, unless an idempotency key says that the
        request is a repeat. The header's may have been made on the way, of whatever.
        """
        wanted = wanted_id or metadata.get(REQUEST_ID_METADATA, "")
        request_id = wanted if wanted and _is_request_id(wanted) else uuid.uuid4().hex
        if request_id in self.inflight_ids:
            if wanted_id and KEY_METADATA not in metadata:
                raise RequestIdInUse("a request with this id is in flight", "request_id")
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
