"""One client request from its arrival to its end: identity, deadline, place, span, timings, access log.

`close` is idempotent, safe to call from a done callback, and gives everything back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog
from opentelemetry.trace import Span, Status, StatusCode

from services.gateway.errors import GatewayError, shape_of
from services.gateway.generation import Generation
from services.gateway.metrics import GatewayMetrics
from services.gateway.planning import Tenant
from services.gateway.request import Plan

CANCELLED, OK = "CANCELLED", "OK"
_log = structlog.get_logger("gateway.access")


@dataclass(slots=True, eq=False)
class Session:
    """State of one client request. Times are monotonic seconds."""

    api: str
    request_id: str
    tenant: Tenant
    deadline_at_s: float
    span: Span
    traceparent: str
    metrics: GatewayMetrics
    release: Callable[[], None]
    started_s: float = field(default_factory=time.monotonic)
    prepare_s: float = 0.0
    model: str = ""
    plan: Plan | None = None
    generation: Generation | None = None
    end_user: str = ""
    first_output_s: float = 0.0
    last_output_s: float = 0.0
    _closed: bool = False

    def output_seen(self) -> None:
        """Note that output is on its way to the client."""
        self.last_output_s = time.monotonic()
        if not self.first_output_s:
            self.first_output_s = self.last_output_s

    def fail(self, error: GatewayError) -> None:
        """The end by an error."""
        self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self.close(shape_of(error).status, type(error).__name__)

    def close(self, code: str = CANCELLED, error: str = "") -> None:
        """The end, one way or another; only the first call counts. code: gRPC status name."""
        if self._closed:
            return
        self._closed = True
        if self.generation is not None:
            self.generation.close()
        self.release()
        self._record(code, error)
        self.span.end()

    def _record(self, code: str, error: str) -> None:
        usage = self.generation.usage() if self.generation is not None else None
        prompt_tokens = self.plan.prompt_tokens if self.plan is not None else 0
        output_tokens = usage.output_tokens if usage is not None else 0
        cached = usage.cached if usage is not None else None
        cached_tokens = cached.local + cached.peer + cached.ram + cached.ssd if cached is not None else 0
        route_s = self.generation.route_s if self.generation is not None else 0.0
        ttft_s = self.first_output_s - self.started_s if self.first_output_s else None
        spread_s = self.last_output_s - self.first_output_s
        per_choice = output_tokens / (len(self.plan.prompts) * self.plan.num_choices) if self.plan is not None else 0
        tpot_s = spread_s / (per_choice - 1) if ttft_s is not None and per_choice > 1 and spread_s > 0 else None
        self.metrics.record_request(api=self.api, model=self.model, code=code, output_tokens=output_tokens)
        if self.generation is not None:
            self.metrics.record_timings(model=self.model, queue_s=route_s, ttft_s=ttft_s, tpot_s=tpot_s)
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.server.time_to_first_token": ttft_s or 0.0,
                "kvmesh.cached_tokens": cached_tokens,
                "rpc.grpc.status": code,
            }
        )
        _log.info(
            "request",
            request_id=self.request_id,
            api=self.api,
            tenant=self.tenant.name,
            end_user=_pseudonym(self.end_user),
            model=self.model,
            code=code,
            error=error,
            worker_id=self.generation.worker_id if self.generation is not None else "",
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            prepare_s=round(self.prepare_s, 6),
            route_s=round(route_s, 6),
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            tpot_s=None if tpot_s is None else round(tpot_s, 6),
            total_s=round(time.monotonic() - self.started_s, 6),
        )


def _pseudonym(end_user: str) -> str:
    """The caller's `user` for joining log lines, without what was written in it."""
    return blake2b(end_user.encode(), digest_size=8).hexdigest() if end_user else ""
