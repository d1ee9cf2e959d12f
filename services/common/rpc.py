"""The one place that makes gRPC channels and servers: limits, keepalive, mesh secret, trace context, health.

Certificates (mTLS) would enter here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from structlog.contextvars import bind_contextvars

from services.common.balancers import Balancers
from services.common.security import MeshSecret

if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

MAX_MESSAGE_BYTES = 16 * 2**20
TOKEN_METADATA = "x-kvmesh-token"
REQUEST_ID_METADATA = "x-request-id"
# On a refusal: not begun here, and another replica of this service may take it.
ELSEWHERE_METADATA = "x-kvmesh-elsewhere"
OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")

_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_CHANNEL_OPTIONS = (
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Several services of one process may talk to the same peer; sharing one connection would couple their flow control.
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
    # Above what Envoy lets through (60 KiB): as it comes gRPC refuses 16 KiB as exhausted resources, a retryable 429.
    ("grpc.max_metadata_size", 80 * 1024),
    ("grpc.absolute_max_metadata_size", 96 * 1024),
)

_UNTOLD_POLL_S = 0.05
_tracer = trace.get_tracer("kvmesh.rpc")


def call_metadata(secret: MeshSecret, request_id: str = "") -> tuple[tuple[str, str], ...]:
    """Metadata of an in-mesh call: the proof of the secret, the current trace context and the request id."""
    return ((TOKEN_METADATA, secret.rpc_token), *caller_metadata(request_id).items())


def caller_metadata(request_id: str = "") -> dict[str, str]:
    """The current trace context and the request id, for a call or for one of several requests on a stream."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if request_id:
        carrier[REQUEST_ID_METADATA] = request_id
    return carrier


def caller_context(metadata: Mapping[str, str]) -> contextvars.Context:
    """A context in which the trace and the request id of `metadata` are current: the other end of caller_metadata."""
    context = contextvars.copy_context()
    context.run(_enter, metadata)
    return context


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to an in-mesh service; calls pass `metadata=call_metadata(...)`."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


class MeshServer:
    """A gRPC server with health and reflection. `secret` None: a public surface that authenticates by itself."""

    def __init__(self, listen: str, *, secret: MeshSecret | None) -> None:
        interceptors: list[_Interceptor] = [_TraceInterceptor()]
        if secret is not None:
            interceptors.insert(0, _SecretInterceptor(secret))
        self.server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
        self._balancers = Balancers()
        self._health = _HealthServicer(self._balancers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._names = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        self._listen = listen
        self.address = ""

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, full_name: str) -> None:
        """Add a servicer by its generated `add_*_to_server` and its full service name."""
        register(servicer, self.server)
        self._names.append(full_name)

    async def start(self, advertise_host: str = "") -> str:
        """Bind and serve; returns the address others use. Health is NOT_SERVING until `set_ready`.

        Raises RuntimeError naming the address when it is taken.
        """
        reflection.enable_server_reflection(self._names, self.server)
        try:
            port = self.server.add_insecure_port(self._listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise RuntimeError(f"cannot listen on {self._listen}: the address is taken or not ours")
        host = advertise_host or self._listen.rpartition(":")[0]
        self.address = f"{host}:{port}"
        await self.set_ready(False)
        await self.server.start()
        return self.address

    async def set_ready(self, ready: bool) -> None:
        """Set what health checks of the whole server and of each of its services say."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def balancers_told(self, within_s: float) -> bool:
        """Wait until all who balance by health checks have heard that this is not ready; False: not in time."""
        ends_s = time.monotonic() + within_s
        while untold := self._balancers.num_untold(now_s := time.monotonic()):
            if now_s >= ends_s:
                break
            await asyncio.sleep(_UNTOLD_POLL_S)
        return untold == 0

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls and let running ones finish for `grace_s` seconds."""
        await self.server.stop(grace_s)


class _HealthServicer(health_aio.HealthServicer):  # type: ignore[misc]
    """Takes down who balances by its answers."""

    def __init__(self, balancers: Balancers) -> None:
        super().__init__()
        self._balancers = balancers

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        if request.service:
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            self._balancers.asked(context.peer(), time.monotonic(), serving=serving)
        return answer


class _SecretInterceptor(_Interceptor):
    def __init__(self, secret: MeshSecret) -> None:
        self._secret = secret

        async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not a member of this mesh")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        if method.startswith(OPEN_SERVICES) or self._secret.matches_rpc_token(str(metadata.get(TOKEN_METADATA, ""))):
            return await continuation(handler_call_details)
        return self._refusal


class _TraceInterceptor(_Interceptor):
    """Makes the caller's trace context current and binds ids to the log for the time of the call.

    Each RPC runs in a task of its own, so what is attached here ends with the call.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata or ()}
        return _traced(handler, metadata)


def _enter(metadata: Mapping[str, str]) -> None:
    otel_context.attach(propagate.extract(metadata))
    if REQUEST_ID_METADATA in metadata:
        bind_contextvars(request_id=metadata[REQUEST_ID_METADATA])


def _traced(handler: grpc.RpcMethodHandler[Any, Any], metadata: dict[str, str]) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.response_streaming:
        # grpc-stubs type the handler's functions as the synchronous server's.
        inner_stream: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            _enter(metadata)
            async for response in inner_stream(request, context):
                yield response

        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(stream, handler.request_deserializer, handler.response_serializer)
    inner_unary: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        _enter(metadata)
        return await inner_unary(request, context)

    make_unary = (
        grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make_unary(unary, handler.request_deserializer, handler.response_serializer)
