"""What scripts and operators rely on of every process: ps, health, reflection, metrics and their names, headers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.log_lines import log_events
from tests.support.mesh import MODEL, Mesh, total, wait_for

GAUGES = {
    "gateway": ("kvmesh_gateway_inflight_requests",),
    "worker": (
        "kvmesh_worker_running_requests",
        "kvmesh_worker_waiting_requests",
        "kvmesh_worker_referenced_blocks",
        "kvmesh_worker_cached_blocks",
    ),
}
OWN_SERVICE = {
    "gateway": "kvmesh.v1.OpenAI",
    "router": "kvmesh.v1.Router",
    "worker": "kvmesh.v1.Worker",
    "kvstore": "kvmesh.v1.KvStore",
}


def test_ps_lists_every_process_with_the_promised_fields(mesh: Mesh) -> None:
    entries = json.loads(mesh.kvmesh("ps", "--json").stdout)
    assert {entry["kind"] for entry in entries} == {"envoy", "valkey", *OWN_SERVICE}
    for entry in entries:
        assert {"name", "kind", "pid", "address", "metrics", "ready", "children"} <= entry.keys()
        roles = sorted(child["role"] for child in entry["children"])
        assert roles == (["engine", "mover"] if entry["kind"] == "worker" else [])
        assert bool(entry["metrics"]) == (entry["kind"] != "valkey")


@pytest.mark.parametrize("kind", OWN_SERVICE)
def test_every_service_has_health_reflection_and_metrics(mesh: Mesh, kind: str) -> None:
    for entry in mesh.of_kind(kind):
        with grpc.insecure_channel(entry["address"]) as channel:
            for name in ("", OWN_SERVICE[kind]):
                request = health_pb2.HealthCheckRequest(service=name)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (listed,) = stub.ServerReflectionInfo(asked, timeout=30)
            assert OWN_SERVICE[kind] in {service.name for service in listed.list_services_response.service}
        samples = mesh.metrics(entry["name"])
        assert all(any(series.startswith(name) for series in samples) for name in GAUGES.get(kind, ()))


def test_metrics_of_a_request_have_the_promised_names(mesh: Mesh, client: openai.OpenAI) -> None:
    before = _request_metrics(mesh)
    prompt = "A prompt that is long enough to fill some blocks of the cache, twice over and over again. " * 3
    usages = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, extra_body={"ignore_eos": True}).usage
        for _ in range(2)
    ]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[1].prompt_tokens_details is not None
    cached = usages[1].prompt_tokens_details.cached_tokens
    assert cached
    expected = {
        "kvmesh_gateway_prompt_tokens_total": 2 * usages[0].prompt_tokens,
        "kvmesh_gateway_output_tokens_total": 8,
        "kvmesh_prompt_tokens_total": 2 * usages[0].prompt_tokens,
        "kvmesh_cached_prompt_tokens_total": cached,
        "kvmesh_ttft_seconds_count": 2,
        "kvmesh_tpot_seconds_count": 2,
    }

    def grown() -> bool:
        now = _request_metrics(mesh)
        # Requests that earlier tests left early may still be counted meanwhile.
        return all(now[name] - before[name] >= least for name, least in expected.items())

    wait_for(grown, within_s=60, what=str(expected))
    workers = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("worker")]
    name = "kvmesh_cached_prompt_tokens_total"
    by_tier = [total(samples, name, tier=tier) for samples in workers for tier in ("local", "peer", "ram", "ssd")]
    assert sum(by_tier) == sum(total(samples, name) for samples in workers)
    gateways = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("gateway")]
    assert sum(total(samples, "kvmesh_gateway_output_tokens_total", tenant="default") for samples in gateways) >= 8


def _request_metrics(mesh: Mesh) -> dict[str, float]:
    workers = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("worker")]
    gateways = [mesh.metrics(entry["name"]) for entry in mesh.of_kind("gateway")]
    exporters = {
        "kvmesh_gateway_prompt_tokens_total": gateways,
        "kvmesh_gateway_output_tokens_total": gateways,
        "kvmesh_prompt_tokens_total": workers,
        "kvmesh_cached_prompt_tokens_total": workers,
        "kvmesh_ttft_seconds_count": gateways,
        "kvmesh_tpot_seconds_count": gateways,
    }
    return {name: sum(total(samples, name) for samples in exported) for name, exported in exporters.items()}


def test_response_headers_and_log_lines_carry_the_ids(mesh: Mesh) -> None:
    trace_id, request_id = "5bf92f3577b34da6a3ce929d0e0e4737", "an-id-of-the-clients"
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 2}).encode()
    headers = {
        "content-type": "application/json",
        "x-request-id": request_id,
        "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
    }
    request = urllib.request.Request(f"{mesh.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.headers["x-request-id"] == request_id
        assert response.headers["x-kvmesh-worker"].startswith("worker-")
        assert int(response.headers["x-kvmesh-cached-tokens"]) >= 0
        assert trace_id in response.headers["traceparent"]

    wrong = urllib.request.Request(f"{mesh.url}/v1/completions", b"{}", headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(wrong, timeout=60)
    with caught.value as refused:  # holds the connection
        assert refused.headers.get_all("x-request-id") == [request_id]

    def lines() -> list[dict[str, str]]:
        return log_events(mesh.logs(), request_id)

    def told() -> set[str]:
        return {line["service"] for line in lines() if "service" in line}

    wait_for(lambda: told() >= {"gateway", "worker"}, within_s=60, what="a line of gateway and worker")
    assert {line["trace_id"] for line in lines() if "service" in line} == {trace_id}
