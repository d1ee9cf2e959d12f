"""The whole bootstrap of one Envoy."""

from __future__ import annotations

from envoy.config.bootstrap.v3 import bootstrap_pb2
from envoy.config.core.v3 import base_pb2
from envoy.config.overload.v3 import overload_pb2
from envoy.extensions.resource_monitors.downstream_connections.v3 import downstream_connections_pb2
from google.protobuf import json_format

from deploy.envoy.clusters import admin_cluster, gateway_cluster, otlp_cluster
from deploy.envoy.listeners import metrics_listener, public_listener
from deploy.envoy.settings import EnvoySettings
from deploy.envoy.wire import packed, socket_address

_MAX_CONNECTIONS = 20_000


def build_bootstrap(settings: EnvoySettings) -> bootstrap_pb2.Bootstrap:
    """Listener, routes and clusters of `settings`; static, no control plane."""
    bootstrap = bootstrap_pb2.Bootstrap(
        node=base_pb2.Node(id="envoy", cluster="kvmesh"),
        admin=bootstrap_pb2.Admin(address=socket_address(settings.admin)),
        overload_manager=_overload_manager(),
    )
    resources = bootstrap.static_resources
    resources.listeners.append(public_listener(settings))
    resources.clusters.append(gateway_cluster(settings))
    if settings.metrics is not None:
        resources.listeners.append(metrics_listener(settings, settings.metrics))
        resources.clusters.append(admin_cluster(settings))
    if settings.otlp is not None:
        resources.clusters.append(otlp_cluster(settings, settings.otlp))
    return bootstrap


def bootstrap_json(settings: EnvoySettings) -> str:
    """What `envoy -c FILE.json` reads."""
    return json_format.MessageToJson(build_bootstrap(settings), preserving_proto_field_name=True)


def _overload_manager() -> overload_pb2.OverloadManager:
    limit = downstream_connections_pb2.DownstreamConnectionsConfig(max_active_downstream_connections=_MAX_CONNECTIONS)
    monitor = overload_pb2.ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections", typed_config=packed(limit)
    )
    return overload_pb2.OverloadManager(resource_monitors=[monitor])
