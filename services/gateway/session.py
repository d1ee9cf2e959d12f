"""One client request from its arrival to its end: identity, deadline, place, span, timings, access log.

`close` is idempotent, safe to call from a done callback, and gives everything back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from services.common.usage import ACCELERATOR_UNIT, Usage
from services.gateway.errors import GatewayError, shape_of
from services.gateway.generation import Generation
from services.gateway.idempotency import KeyedNames
from services.gateway.keyed_run import KeyedRun
from services.gateway.metrics import GatewayMetrics
from services.gateway.planning import Tenant
from services.gateway.request import Plan
from services.gateway.usage.book import UsageBook

CANCELLED, OK = "CANCELLED", "OK"
_log = structlog.get_logger("gateway.access")


@dataclass(slots=True, eq=False)
class Session:
    """State of one client request. Times are monotonic seconds. settle: gives its tenant back what it did not use.

    names: what follows from its idempotency key. keyed: its run under the key, where it is the one that runs.
    replay_of: the run of another request with the key whose answer it reads. created_s: Unix time of the first of them.
    is_offline: nobody waits for it, so it is of the least urgent class and has no objectives.
    cold_start_s: forecast when it began to wait for its model to be loaded, 0 where it did not.
    """

    api: str
    request_id: str
    tenant: Tenant
    deadline_at_s: float
    span: Span
    traceparent: str
    metrics: GatewayMetrics
    usage: UsageBook
    release: Callable[[], None]
    started_s: float = field(default_factory=time.monotonic)
    prepare_s: float = 0.0
    cold_start_s: float = 0.0
    model: str = ""
    plan: Plan | None = None
    generation: Generation | None = None
    settle: Callable[[], None] | None = None
    end_user: str = ""
    idempotency_key: str | None = None
    names: KeyedNames | None = None
    keyed: KeyedRun | None = None
    replay_of: str = ""
    is_offline: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    first_output_s: float = 0.0
    last_output_s: float = 0.0
    _closed: bool = False

    @property
    def run_id(self) -> str:
        """By which routers and workers know it."""
        return self.keyed.run_id if self.keyed is not None else self.request_id

    @property
    def answer_id(self) -> str:
        """By which its answer is known, which a repeat shares."""
        return self.names.answer_id if self.names is not None else self.request_id

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def output_seen(self) -> None:
        """Note that output is on its way to the client."""
        self.last_output_s = time.monotonic()
        if not self.first_output_s:
            self.first_output_s = self.last_output_s

    def withdraw(self) -> None:
        """End what has begun; the request may begin again."""
        if self.generation is not None:
            self.generation.close()
        if self.settle is not None:
            self.settle()
        self.generation, self.settle = None, None

    def fail(self, error: GatewayError) -> None:
        """The end by an error."""
        self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self.close(shape_of(error).status, type(error).__name__)

    def abandon(self) -> None:
        """Close it, and have nobody keep what it has begun."""
        if self.keyed is not None:
            self.keyed.is_abandoned = True
        self.close()

    def close(self, code: str = CANCELLED, error: str = "") -> None:
        """The end, one way or another; only the first call counts. code: gRPC status name."""
        if self._closed:
            return
        self._closed = True
        if self.generation is not None:
            self.generation.close()
        if self.settle is not None:
            self.settle()
        if self.keyed is not None:
            self.keyed.end(is_complete=code == OK, is_failed=code not in (OK, CANCELLED))
        self.release()
        # A done callback knows no current span, and the log line must carry the request's.
        with trace.use_span(self.span, end_on_exit=True):
            self._record(code, error)

    def _record(self, code: str, error: str) -> None:
        figures = self._figures()
        self._count_usage()
        self.metrics.record_request(api=self.api, model=self.model, code=code, error=error)
        if self.generation is not None and not self.is_offline:
            self.metrics.record_timings(
                model=self.model, queue_s=figures.route_s, ttft_s=figures.ttft_s, tpot_s=figures.tpot_s
            )
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": figures.prompt_tokens,
                "gen_ai.usage.output_tokens": figures.output_tokens,
                "gen_ai.server.time_to_first_token": figures.ttft_s or 0.0,
                "kvmesh.cached_tokens": figures.cached_tokens,
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
            run_id=self.replay_of or self.run_id,
            is_replay=bool(self.replay_of),
            worker_id=self.generation.worker_id if self.generation is not None else "",
            prepare_s=round(self.prepare_s, 6),
            cold_start_s=round(self.cold_start_s, 3),
            total_s=round(time.monotonic() - self.started_s, 6),
            **figures.rounded(),
        )

    def _count_usage(self) -> None:
        """What the client was told, or would have been; of a request that no worker has taken nothing."""
        if self.generation is None or not self.generation.is_taken:
            return
        told = self.generation.usage()
        usage = Usage(
            requests=1,
            prompt_tokens=told.prompt_tokens,
            cached_local=told.cached.local,
            cached_peer=told.cached.peer,
            cached_ram=told.cached.ram,
            cached_ssd=told.cached.ssd,
            output_tokens=told.output_tokens,
            accelerator_us=round(self.generation.accelerator_s * ACCELERATOR_UNIT),
        )
        run = self.replay_of or (self.run_id if self.keyed is not None else "")
        self.usage.count(self.tenant.name, self.model, usage, run=run)

    def _figures(self) -> _Figures:
        if self.plan is None or self.generation is None:
            return _Figures(prompt_tokens=self.plan.prompt_tokens if self.plan is not None else 0)
        usage = self.generation.usage()
        cached = usage.cached
        ttft_s = self.first_output_s - self.started_s if self.first_output_s else None
        spread_s = self.last_output_s - self.first_output_s
        further_tokens = usage.output_tokens / (len(self.plan.prompts) * self.plan.num_choices) - 1
        return _Figures(
            prompt_tokens=self.plan.prompt_tokens,
            cached_tokens=cached.local + cached.peer + cached.ram + cached.ssd,
            output_tokens=usage.output_tokens,
            route_s=self.generation.route_s,
            ttft_s=ttft_s,
            tpot_s=spread_s / further_tokens if ttft_s is not None and further_tokens > 0 and spread_s > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class _Figures:
    """Lengths and timings of a request; None where there were too few tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    route_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None

    def rounded(self) -> dict[str, float | None]:
        """For the access log."""
        return {name: value if value is None else round(value, 6) for name, value in asdict(self).items()}


def _pseudonym(end_user: str) -> str:
    """The caller's `user` for joining log lines, without what was written in it."""
    return blake2b(end_user.encode(), digest_size=8).hexdigest() if end_user else ""
