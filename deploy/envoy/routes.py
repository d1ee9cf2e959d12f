"""What is reachable: the public gRPC services, natively and as what the transcoder made of an HTTP request."""

from __future__ import annotations

from envoy.config.route.v3 import route_components_pb2, route_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.type.matcher.v3 import string_pb2
from grpc_health.v1 import health_pb2

from deploy.envoy.clusters import ADMIN, GATEWAYS
from deploy.envoy.descriptors import FILES_SERVICE, INFERENCE_SERVICE, OPENAI_SERVICE
from deploy.envoy.wire import packed, seconds, uint32
from services.common.rpc import ELSEWHERE_METADATA, TOKEN_METADATA

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
PUBLIC_SERVICES = (OPENAI_SERVICE, FILES_SERVICE, INFERENCE_SERVICE, HEALTH_SERVICE)
# Safe for any method: in each case no gateway has begun the request; a draining one says so in a header.
_RETRY_ON = "connect-failure,refused-stream,reset-before-request,retriable-headers"
_MAX_RETRIES = 2
# The gateway that has just failed has the fewest requests, so balancing prefers it; drawing again costs nothing.
_MAX_DRAWS = 32


def public_routes() -> route_pb2.RouteConfiguration:
    """One route for each public service; anything else is Envoy's own 404."""
    return _configuration("public", [_service_route(name) for name in PUBLIC_SERVICES])


def metrics_routes() -> route_pb2.RouteConfiguration:
    """The Prometheus page and nothing else of the admin interface."""
    route = route_components_pb2.Route(
        match=route_components_pb2.RouteMatch(path="/metrics"),
        route=route_components_pb2.RouteAction(cluster=ADMIN, prefix_rewrite="/stats/prometheus"),
    )
    return _configuration("metrics", [route])


def _configuration(name: str, routes: list[route_components_pb2.Route]) -> route_pb2.RouteConfiguration:
    host = route_components_pb2.VirtualHost(
        name=name, domains=["*"], routes=routes, request_headers_to_remove=[TOKEN_METADATA]
    )
    return route_pb2.RouteConfiguration(name=name, virtual_hosts=[host])


def _service_route(service: str) -> route_components_pb2.Route:
    return route_components_pb2.Route(
        name=service,
        match=route_components_pb2.RouteMatch(
            prefix=f"/{service}/", grpc=route_components_pb2.RouteMatch.GrpcRouteMatchOptions()
        ),
        # The deadline travels as grpc-timeout and is the gateway's to keep.
        route=route_components_pb2.RouteAction(cluster=GATEWAYS, timeout=seconds(0), retry_policy=_retry_policy()),
    )


def _retry_policy() -> route_components_pb2.RetryPolicy:
    elsewhere = route_components_pb2.RetryPolicy.RetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=packed(previous_hosts_pb2.PreviousHostsPredicate()),
    )
    return route_components_pb2.RetryPolicy(
        retry_on=_RETRY_ON,
        num_retries=uint32(_MAX_RETRIES),
        retry_host_predicate=[elsewhere],
        retriable_headers=[
            route_components_pb2.HeaderMatcher(
                name=ELSEWHERE_METADATA, string_match=string_pb2.StringMatcher(exact="1")
            )
        ],
        host_selection_retry_max_attempts=_MAX_DRAWS,
    )
