"""Upstreams: the gateways, and the OTLP collector when there is one."""

from __future__ import annotations

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from envoy.config.core.v3 import health_check_pb2, protocol_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from envoy.type.v3 import percent_pb2

from deploy.envoy.descriptors import OPENAI_SERVICE
from deploy.envoy.settings import Address, EnvoySettings
from deploy.envoy.wire import boolean, packed, seconds, socket_address, uint32

GATEWAYS = "gateways"
OTLP = "otlp"
ADMIN = "admin"
_MAX_REQUESTS = 10_000
_PING_INTERVAL_S = 10.0
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def gateway_cluster(settings: EnvoySettings) -> cluster_pb2.Cluster:
    """All gateways, the least busy of two preferred, checked by gRPC health.

    Only failures to connect eject a gateway: its error answers are answers. With every gateway unhealthy Envoy sends
    to all the same, so that what the client reads is a gateway's own word where one is still there.
    """
    cluster = _cluster(GATEWAYS, settings.gateways, settings.connect_timeout_s)
    cluster.lb_policy = cluster_pb2.Cluster.LEAST_REQUEST
    cluster.common_lb_config.healthy_panic_threshold.CopyFrom(percent_pb2.Percent(value=1))
    cluster.health_checks.append(_health_check(settings))
    cluster.outlier_detection.CopyFrom(_outlier_detection())
    cluster.circuit_breakers.CopyFrom(_circuit_breakers())
    return cluster


def otlp_cluster(settings: EnvoySettings, collector: Address) -> cluster_pb2.Cluster:
    """The trace collector."""
    return _cluster(OTLP, (collector,), settings.connect_timeout_s)


def admin_cluster(settings: EnvoySettings) -> cluster_pb2.Cluster:
    """Envoy's own admin page, as the source of the metrics listener."""
    cluster = _cluster(ADMIN, (settings.admin,), settings.connect_timeout_s)
    cluster.typed_extension_protocol_options.clear()
    return cluster


def _cluster(name: str, addresses: tuple[Address, ...], connect_timeout_s: float) -> cluster_pb2.Cluster:
    by_ip = all(address.is_ip for address in addresses)
    cluster = cluster_pb2.Cluster(
        name=name,
        type=cluster_pb2.Cluster.STATIC if by_ip else cluster_pb2.Cluster.STRICT_DNS,
        connect_timeout=seconds(connect_timeout_s),
        load_assignment=endpoint_pb2.ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=[_endpoint(one) for one in addresses])],
        ),
    )
    if not by_ip:
        cluster.dns_refresh_rate.CopyFrom(seconds(2))
        cluster.dns_lookup_family = cluster_pb2.Cluster.V4_PREFERRED
    cluster.typed_extension_protocol_options[_HTTP_OPTIONS].CopyFrom(packed(_http2()))
    return cluster


def _endpoint(address: Address) -> endpoint_components_pb2.LbEndpoint:
    return endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(address=socket_address(address))
    )


def _http2() -> http_protocol_options_pb2.HttpProtocolOptions:
    keepalive = protocol_pb2.KeepaliveSettings(interval=seconds(_PING_INTERVAL_S), timeout=seconds(_PING_INTERVAL_S))
    options = protocol_pb2.Http2ProtocolOptions(connection_keepalive=keepalive)
    return http_protocol_options_pb2.HttpProtocolOptions(
        explicit_http_config=http_protocol_options_pb2.HttpProtocolOptions.ExplicitHttpConfig(
            http2_protocol_options=options
        )
    )


def _health_check(settings: EnvoySettings) -> health_check_pb2.HealthCheck:
    interval = seconds(settings.health_interval_s)
    return health_check_pb2.HealthCheck(
        timeout=seconds(2 * settings.health_interval_s),
        interval=interval,
        no_traffic_interval=interval,
        unhealthy_interval=seconds(settings.health_interval_s / 2),
        unhealthy_threshold=uint32(2),
        healthy_threshold=uint32(1),
        always_log_health_check_failures=False,
        # By name: to the gateway that is a balancer, whom it tells before it leaves.
        grpc_health_check=health_check_pb2.HealthCheck.GrpcHealthCheck(service_name=OPENAI_SERVICE),
    )


def _outlier_detection() -> outlier_detection_pb2.OutlierDetection:
    return outlier_detection_pb2.OutlierDetection(
        split_external_local_origin_errors=True,
        interval=seconds(1),
        base_ejection_time=seconds(2),
        max_ejection_time=seconds(10),
        max_ejection_percent=uint32(50),
        consecutive_local_origin_failure=uint32(2),
        enforcing_consecutive_local_origin_failure=uint32(100),
        enforcing_consecutive_5xx=uint32(0),
        enforcing_consecutive_gateway_failure=uint32(0),
        enforcing_success_rate=uint32(0),
        enforcing_local_origin_success_rate=uint32(0),
        always_eject_one_host=boolean(False),
    )


def _circuit_breakers() -> circuit_breaker_pb2.CircuitBreakers:
    thresholds = circuit_breaker_pb2.CircuitBreakers.Thresholds(
        max_connections=uint32(1_024),
        max_pending_requests=uint32(_MAX_REQUESTS),
        max_requests=uint32(_MAX_REQUESTS),
        max_retries=uint32(256),
    )
    return circuit_breaker_pb2.CircuitBreakers(thresholds=[thresholds])
