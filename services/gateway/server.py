"""A whole gateway in one object: builds the parts from settings, runs them, drains them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog
from kvmesh.v1 import inference_pb2, openai_pb2
from kvmesh.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from kvmesh.v1.openai_pb2_grpc import add_OpenAIFilesServicer_to_server, add_OpenAIServicer_to_server
from kvmesh.v1.router_pb2 import ModelSnapshot

from services.common.fair_queue import StarvationBound
from services.common.models import ModelSource, resolve_model
from services.common.process import generated_instance
from services.common.rpc import MeshServer
from services.common.security import MeshSecret
from services.gateway.admission import Admission
from services.gateway.api.native import InferenceService
from services.gateway.api.openai_service import OpenAIService
from services.gateway.batches.parts import Batches, build_batches
from services.gateway.batches.service import FilesService
from services.gateway.beginning import Beginner
from services.gateway.catalog import ModelCatalog
from services.gateway.cold_starts import ColdLimits, ColdStarts
from services.gateway.config import GatewaySettings
from services.gateway.core import Core
from services.gateway.fair_line import FairLine
from services.gateway.grammars.checker import GrammarChecker
from services.gateway.keyed_requests import KeyedRequests
from services.gateway.keys import KeyRing
from services.gateway.load_times import LoadTimes
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placement
from services.gateway.pulse import Pulse
from services.gateway.queue_reporter import QueueReporter
from services.gateway.quotas import Quotas
from services.gateway.retry_budget import RetryBudget
from services.gateway.router_client import RouterClient
from services.gateway.tenant_generations import TenantGenerations
from services.gateway.tenants import Tenants
from services.gateway.text.model_calls import tell_call_formats
from services.gateway.text.pool import Preparer, TextPool
from services.gateway.text.text_model import load_text_models
from services.gateway.tickets import LineLimits
from services.gateway.usage.book import UsageBook
from services.gateway.usage.prices import Prices
from services.gateway.worker_channels import WorkerChannels

# Silence is looked for this often, and held-back events this often while writes are paced.
_PULSE_S, _PACED_PULSE_S = 0.1, 0.02
_LEAVE_S = 1.0
# Longest wait for a router's word on which models there are, and for balancers to hear that this gateway leaves.
_LOOK_AROUND_S, _TELL_S = 5.0, 5.0
# What balancers had sent before they heard arrives meanwhile.
_SETTLE_S = 0.5
_DRAIN_POLL_S = 0.05
_log = structlog.get_logger("gateway")


class GatewayServer:
    """The running gateway: `address` to call, `core` to look into, `drain` before leaving the context."""

    def __init__(self, settings: GatewaySettings, secret: MeshSecret, instance: str = "") -> None:
        """Loads tokenizers and keys. Call inside the running loop. Raises ConfigurationError."""
        instance = instance or generated_instance("gateway")
        self._generations = TenantGenerations(settings.redis_url, instance, secret.block_key, settings.generations_file)
        self.quotas = Quotas(self._generations.client, instance, secret.block_key)
        self.usage = UsageBook(self._generations.client, Prices(settings.prices_file), settings.usage_file)
        self.keyed = KeyedRequests(self._generations.client, secret.request_key, settings.idempotency_window_s)
        self._settings = settings
        self.router = RouterClient(
            settings.routers, secret, ask_timeout_s=settings.ask_timeout_s, silence_s=settings.router_silence_s
        )
        self.pulse = Pulse(min(_PULSE_S, settings.heartbeat_s / 4), _PACED_PULSE_S)
        self.channels = WorkerChannels(secret, self.pulse, silence_s=settings.worker_silence_s)
        self.grammars = GrammarChecker(
            [resolve_model(spec) for spec in settings.models],
            max_bytes=settings.max_grammar_bytes,
            cpu_s=settings.grammar_cpu_s,
            memory_bytes=settings.grammar_memory_bytes,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.core = self._build_core(settings, secret)
        self.batches: Batches | None = build_batches(settings, self.core, self._generations.client, instance)
        self._server = MeshServer(settings.listen, secret=None)
        self._server.add(
            add_InferenceServicer_to_server,
            InferenceService(self.core),
            inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        )
        self._server.add(
            add_OpenAIServicer_to_server,
            OpenAIService(self.core, heartbeat_s=settings.heartbeat_s),
            openai_pb2.DESCRIPTOR.services_by_name["OpenAI"].full_name,
        )
        self._server.add(
            add_OpenAIFilesServicer_to_server,
            FilesService(self.core, self.batches),
            openai_pb2.DESCRIPTOR.services_by_name["OpenAIFiles"].full_name,
        )
        self.address = ""

    def _build_core(self, settings: GatewaySettings, secret: MeshSecret) -> Core:
        sources = [resolve_model(spec) for spec in settings.models]
        texts = load_text_models(sources, settings.call_format_of)
        tell_call_formats({name: text.calls for name, text in texts.items()})
        admission = Admission(
            max_total=settings.max_inflight_requests, max_tenant=settings.max_tenant_inflight_requests
        )
        tenants = Tenants(settings.tenants_file)
        metrics = GatewayMetrics(lambda: admission.total, lambda: line.num_waiting)
        line = FairLine(_line_limits(settings), tenants.weight_of, metrics.count_refusal)
        placement = self._placement(settings, metrics, line)
        catalog = ModelCatalog(texts.values(), settings.on_demand_models)
        cold = _cold_starts(settings, sources, catalog, line.somebody_waits)
        pool = TextPool(
            sources,
            Preparer(texts, secret.block_key),
            block_key=secret.block_key,
            processes=settings.text_processes,
            timeout_s=settings.prepare_timeout_s,
            call_formats=settings.call_format_of,
        )
        self._observe(metrics, pool, catalog, cold)
        return Core(
            keys=KeyRing(settings.keys_file),
            generations=self._generations,
            catalog=catalog,
            cold=cold,
            pool=pool,
            admission=admission,
            placement=placement,
            tenants=tenants,
            beginner=Beginner(
                catalog,
                pool,
                placement,
                tenants,
                self.quotas,
                metrics,
                self.keyed,
                self.grammars,
                cold,
                secret.block_key,
            ),
            metrics=metrics,
            usage=self.usage,
            default_deadline_s=settings.default_deadline_s,
        )

    def _observe(self, metrics: GatewayMetrics, pool: TextPool, catalog: ModelCatalog, cold: ColdStarts) -> None:
        """The figures that the parts keep themselves."""
        router, channels, grammars = self.router, self.channels, self.grammars
        totals: dict[str, tuple[str, Callable[[], int]]] = {
            "kvmesh_gateway_router_failovers": ("Times that a Route stream was lost.", lambda: router.failovers),
            "kvmesh_gateway_dropped_dones": ("Ends of attempts that no router was told.", lambda: router.dropped_dones),
            "kvmesh_gateway_text_pool_losses": ("Times that the text processes were lost.", lambda: pool.losses),
            "kvmesh_gateway_grammar_losses": (
                "Grammars over their limits, and losses of their process.",
                lambda: grammars.losses,
            ),
            "kvmesh_gateway_grammar_refusals": (
                "Requests refused for the form of their answer.",
                lambda: grammars.refusals,
            ),
            "kvmesh_gateway_silent_links": (
                "Streams to workers left for their silence.",
                lambda: channels.silent_links,
            ),
            "kvmesh_gateway_late_events": (
                "What workers said of attempts that were over.",
                lambda: channels.late_events,
            ),
        }
        gauges: dict[str, tuple[str, Callable[[], int]]] = {
            "kvmesh_gateway_unserved_versions": (
                "Versions with traffic that no worker is ready for: others get their requests.",
                lambda: len(catalog.unserved),
            ),
            "kvmesh_gateway_cold_requests": ("Requests that wait for models to be loaded.", lambda: cold.num_waiting),
            "kvmesh_gateway_open_attempts": ("Attempts at workers in flight.", channels.users),
            "kvmesh_gateway_open_asks": ("Asks that no router has answered.", lambda: router.num_pending),
            "kvmesh_gateway_untold_requests": (
                "Requests whose usage Redis has not been told of.",
                lambda: self.usage.num_untold,
            ),
            "kvmesh_gateway_open_records": ("Idempotency records being written.", lambda: self.keyed.num_open),
        }
        for name, (description, read) in totals.items():
            metrics.observe_total(name, description, read)
        for name, (description, read) in gauges.items():
            metrics.observe_gauge(name, description, read)

    def _placement(self, settings: GatewaySettings, metrics: GatewayMetrics, line: FairLine) -> Placement:
        return Placement(
            router=self.router,
            line=line,
            retries=RetryBudget(burst=settings.retry_burst, per_s=settings.retry_per_s),
            channels=self.channels,
            pulse=self.pulse,
            metrics=metrics,
            admit_patience_s=settings.admit_patience_s,
            admit_timeout_s=settings.admit_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            max_attempts=settings.max_attempts,
            rescue_wait_s=settings.rescue_wait_s,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayServer]:
        """Serve inside the block. Raises RuntimeError when the address is taken."""
        try:
            await self.core.pool.start()
            parts = {
                "route": self.router.run(),
                "models": self.router.watch_models(self._take_models),
                "pulse": self.pulse.run(),
                "channels": self.channels.sweep(),
                "generations": self._generations.run(),
                "quotas": self.quotas.run(),
                "usage": self.usage.run(),
                "queues": QueueReporter(self.core.placement.line, self.core.cold, self.router.report).run(),
            }
            if self.batches is not None:
                parts["batches"] = self.batches.runner.run()
            self._tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
            await self._generations.started()
            self.address = await self._server.start(self._settings.advertise_host)
            # Requests that came before would be refused for want of a model.
            await self.router.models_told(_LOOK_AROUND_S)
            await self._server.set_ready(True)
            yield self
        finally:
            await self._server.stop(0)
            if self.batches is not None:
                await self.batches.close()
            for task in self._tasks:
                task.cancel()
            for result in await asyncio.gather(*self._tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    _log.error("background_task_failed", error=repr(result))
            await self.grammars.close()
            await self.keyed.close()
            await self.usage.close()
            await self._generations.close()
            await self.channels.close()
            await self.router.close()
            self.core.pool.close()

    def _take_models(self, snapshot: ModelSnapshot) -> None:
        self.core.catalog.update(snapshot)
        self.core.cold.look()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`. Raises RuntimeError when a background task has ended: without it nobody is served well."""
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopping, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    raise RuntimeError(f"its part {task.get_name()} has ended")
        finally:
            stopping.cancel()

    async def drain(self, *, tell: bool = True) -> None:
        """Turn health off, refuse new requests and wait until the running ones have ended, within the deadline.

        tell: stay until every balancer has heard of it, and refuse what it sends until then; a request that reached a
        closing server would be lost, since its balancer could not know that it has not begun.
        """
        self.core.admission.draining = True
        await self._server.set_ready(False)
        if self.batches is not None:
            await self.batches.runner.stop()
        ends_s = time.monotonic() + self._settings.drain_deadline_s
        _log.info("draining", inflight=self.core.admission.total)
        while self.core.admission.total and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)
        _log.info("drained", inflight=self.core.admission.total)
        if tell:
            if not await self._server.balancers_told(_TELL_S):
                _log.warning("balancers_not_told", waited_s=_TELL_S)
            await asyncio.sleep(_SETTLE_S)
        await self._server.stop(_LEAVE_S)


def _cold_starts(
    settings: GatewaySettings, sources: Sequence[ModelSource], catalog: ModelCatalog, wanted: asyncio.Event
) -> ColdStarts:
    on_demand = {source.name: source.num_bytes() for source in sources if source.name in catalog.on_demand}
    return ColdStarts(
        LoadTimes(on_demand, settings.load_bytes_per_s, settings.load_start_s),
        ColdLimits(settings.max_cold_requests, settings.max_cold_wait_s),
        serves=catalog.serves,
        wanted=wanted,
    )


def _line_limits(settings: GatewaySettings) -> LineLimits:
    return LineLimits(
        max_waiting=settings.max_waiting_requests,
        max_tenant_waiting=settings.max_tenant_waiting_requests,
        max_wait_s=settings.max_wait_s,
        starvation=StarvationBound(settings.starve_s, settings.starve_grants),
    )
