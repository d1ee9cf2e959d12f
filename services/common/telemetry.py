"""Logs, traces and metrics of a process, set up once at start.

Logs are JSON lines (structlog) on stderr with trace_id, span_id and request_id where there are any. Traces go to the
OTLP endpoint of the standard `OTEL_*` variables when one is set. Metrics are OpenTelemetry instruments behind a
Prometheus endpoint. Lengths and timings are recorded, content never.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import start_http_server

from services.common.release import RELEASE

SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)


def configure_logging(service: str, instance: str, level: str) -> None:
    """Route structlog and the standard library's logging to JSON lines on stderr."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace_ids,
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def configure_tracing(service: str, instance: str) -> TracerProvider | None:
    """Export spans when an OTLP endpoint is configured; the provider to shut down at exit, None without one."""
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return None
    provider = TracerProvider(resource=_resource(service, instance))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    return provider


def configure_metrics(service: str, instance: str, listen: str) -> str:
    """Serve `/metrics`; returns its address "host:port". Raises RuntimeError when the address is taken."""
    seconds = View(
        instrument_name="kvmesh_*_seconds", aggregation=ExplicitBucketHistogramAggregation(boundaries=SECONDS_BUCKETS)
    )
    provider = MeterProvider(
        metric_readers=[PrometheusMetricReader()], resource=_resource(service, instance), views=[seconds]
    )
    metrics.set_meter_provider(provider)
    provider.get_meter("kvmesh").create_up_down_counter(
        "kvmesh_build_info", description="1, with the release of KVMesh that the process runs."
    ).add(1, {"release": RELEASE})
    host, _, port = listen.rpartition(":")
    try:
        server, _thread = start_http_server(int(port), addr=host)
    except OSError as error:
        raise RuntimeError(f"cannot serve metrics on {listen}: {error.strerror}") from None
    return f"{host}:{server.server_port}"


@contextmanager
def process_telemetry(service: str, instance: str, *, level: str, metrics_listen: str) -> Iterator[str]:
    """All three for the life of a process; yields the address of `/metrics` and flushes spans at exit."""
    configure_logging(service, instance, level)
    provider = configure_tracing(service, instance)
    try:
        yield configure_metrics(service, instance, metrics_listen)
    finally:
        if provider is not None:
            provider.shutdown()


def _resource(service: str, instance: str) -> Resource:
    names = {"service.name": f"kvmesh-{service}", "service.instance.id": instance}
    return Resource.create(names | {"service.version": RELEASE})


def _add_trace_ids(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event
