"""The public listener: HTTP/1.1 and HTTP/2 on one port, the OpenAI API transcoded, gRPC as it is."""

from __future__ import annotations

from importlib.resources import files

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.config.core.v3 import base_pb2, protocol_pb2, substitution_format_string_pb2
from envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from envoy.config.route.v3 import route_pb2
from envoy.config.trace.v3 import http_tracer_pb2, opentelemetry_pb2
from envoy.extensions.access_loggers.stream.v3 import stream_pb2
from envoy.extensions.filters.http.grpc_json_transcoder.v3 import transcoder_pb2
from envoy.extensions.filters.http.lua.v3 import lua_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.request_id.uuid.v3 import uuid_pb2
from envoy.type.v3 import percent_pb2
from google.protobuf import message, struct_pb2

from deploy.envoy.clusters import OTLP
from deploy.envoy.descriptors import FILES_SERVICE, OPENAI_SERVICE, openai_descriptor_set
from deploy.envoy.local_replies import local_reply_config, lua_tables
from deploy.envoy.routes import metrics_routes, public_routes
from deploy.envoy.settings import Address, EnvoySettings
from deploy.envoy.wire import boolean, packed, seconds, socket_address, uint32

_Manager = http_connection_manager_pb2.HttpConnectionManager
# Lengths, timings and ids. The query string is left out with the path's: clients put keys there by mistake.
_ACCESS_LOG_FIELDS = {
    "timestamp": "%START_TIME%",
    "event": "http",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "trace_id": "%TRACE_ID%",
    "method": "%REQ(X-ENVOY-ORIGINAL-METHOD?:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS_NUMBER%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "upstream": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
}


def public_listener(settings: EnvoySettings) -> listener_pb2.Listener:
    """The one port of the mesh."""
    manager = _manager("public", public_routes())
    manager.access_log.append(_access_log())
    manager.local_reply_config.CopyFrom(local_reply_config())
    _set_request_ids(manager)
    _set_timeouts(manager, settings)
    if settings.otlp is not None:
        manager.tracing.CopyFrom(_tracing(settings))
    # On the way out the order is reversed: the transcoder first, then the script that reads what it made.
    manager.http_filters.insert(0, _filter("envoy.filters.http.lua", _error_script()))
    manager.http_filters.insert(1, _filter("envoy.filters.http.grpc_json_transcoder", _transcoder(settings)))
    return _listener("public", settings.listen, manager)


def metrics_listener(settings: EnvoySettings, address: Address) -> listener_pb2.Listener:
    """`/metrics` for a Prometheus that is not on this host; the admin interface itself stays on loopback."""
    manager = _manager("metrics", metrics_routes())
    _set_timeouts(manager, settings)
    return _listener("metrics", address, manager)


def _listener(name: str, address: Address, manager: message.Message) -> listener_pb2.Listener:
    return listener_pb2.Listener(
        name=name,
        address=socket_address(address),
        # Two Envoys must not share the port unnoticed.
        enable_reuse_port=boolean(False),
        filter_chains=[
            listener_components_pb2.FilterChain(
                filters=[
                    listener_components_pb2.Filter(
                        name="envoy.filters.network.http_connection_manager", typed_config=packed(manager)
                    )
                ]
            )
        ],
    )


def _manager(name: str, routes: route_pb2.RouteConfiguration) -> http_connection_manager_pb2.HttpConnectionManager:
    return _Manager(
        codec_type=_Manager.AUTO,
        stat_prefix=name,
        route_config=routes,
        server_name="kvmesh",
        use_remote_address=boolean(True),
        normalize_path=boolean(True),
        http2_protocol_options=protocol_pb2.Http2ProtocolOptions(max_concurrent_streams=uint32(1_024)),
        http_filters=[_filter("envoy.filters.http.router", router_pb2.Router(suppress_envoy_headers=True))],
    )


def _set_request_ids(manager: http_connection_manager_pb2.HttpConnectionManager) -> None:
    manager.generate_request_id.value = True
    manager.preserve_external_request_id = True
    manager.always_set_request_id_in_response = True
    # As it comes the extension writes a sampling bit into the client's own id.
    ids = uuid_pb2.UuidRequestIdConfig(
        pack_trace_reason=boolean(False), use_request_id_for_trace_sampling=boolean(False)
    )
    manager.request_id_extension.typed_config.CopyFrom(packed(ids))


def _set_timeouts(manager: http_connection_manager_pb2.HttpConnectionManager, settings: EnvoySettings) -> None:
    manager.request_headers_timeout.CopyFrom(seconds(settings.header_timeout_s))
    manager.request_timeout.CopyFrom(seconds(settings.body_timeout_s))
    manager.stream_idle_timeout.CopyFrom(seconds(settings.idle_timeout_s))


def _tracing(settings: EnvoySettings) -> http_connection_manager_pb2.HttpConnectionManager.Tracing:
    collector = opentelemetry_pb2.OpenTelemetryConfig(service_name="envoy")
    collector.grpc_service.envoy_grpc.cluster_name = OTLP
    collector.grpc_service.timeout.CopyFrom(seconds(1))
    return _Manager.Tracing(
        random_sampling=percent_pb2.Percent(value=settings.trace_sampling_percent),
        spawn_upstream_span=boolean(True),
        provider=http_tracer_pb2.Tracing.Http(name="envoy.tracers.opentelemetry", typed_config=packed(collector)),
    )


def _filter(name: str, config: message.Message) -> http_connection_manager_pb2.HttpFilter:
    return http_connection_manager_pb2.HttpFilter(name=name, typed_config=packed(config))


def _error_script() -> lua_pb2.Lua:
    source = files("deploy.envoy").joinpath("openai_errors.lua").read_text()
    return lua_pb2.Lua(default_source_code=base_pb2.DataSource(inline_string=lua_tables() + source))


def _transcoder(settings: EnvoySettings) -> transcoder_pb2.GrpcJsonTranscoder:
    return transcoder_pb2.GrpcJsonTranscoder(
        proto_descriptor_bin=openai_descriptor_set(),
        services=[OPENAI_SERVICE, FILES_SERVICE],
        convert_grpc_status=True,
        ignore_unknown_query_parameters=True,
        request_validation_options=transcoder_pb2.GrpcJsonTranscoder.RequestValidationOptions(
            reject_unknown_method=True
        ),
        max_request_body_size=uint32(settings.max_body_bytes),
        max_response_body_size=uint32(settings.max_body_bytes),
    )


def _access_log() -> accesslog_pb2.AccessLog:
    fields = struct_pb2.Struct()
    fields.update(_ACCESS_LOG_FIELDS)
    config = stream_pb2.StdoutAccessLog(
        log_format=substitution_format_string_pb2.SubstitutionFormatString(json_format=fields)
    )
    return accesslog_pb2.AccessLog(name="envoy.access_loggers.stdout", typed_config=packed(config))
