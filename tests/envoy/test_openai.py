"""The OpenAI API through Envoy: transcoding, streaming, errors, limits, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest

from deploy.envoy.settings import Address
from tests.envoy.edge import Edge, Gateway, free_port, running_envoy
from tests.envoy.http_client import read_head, request
from tests.support.log_lines import log_events

CHAT = "/v1/chat/completions"
# Less than what Nagle's algorithm holds back, and more than a try takes that nothing else on the machine disturbs.
_HELD_BACK_S, _TRIES = 0.035, 30


def script(**fields: object) -> bytes:
    return json.dumps(fields).encode()


async def test_a_json_answer_passes_with_its_headers(edge: Edge) -> None:
    async with request(edge.port, "POST", CHAT, script(), {"x-request-id": "mine-1"}) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-kvmesh-worker"] == "worker-0"
        assert json.loads(await response.body()) == {"length": 2}
        assert not [name for name in response.headers if name.startswith(("grpc-", "x-envoy-"))]


async def test_a_request_id_is_made_where_none_is_given(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, script()) as response:
        assert len(response.headers["x-request-id"]) == 36
        assert gateway.openai.metadata[0]["x-request-id"] == response.headers["x-request-id"]


async def test_events_reach_the_client_as_they_are_produced(edge: Edge) -> None:
    async with request(edge.port, "POST", CHAT, script(events=4, gap_s=0.5)) as response:
        assert response.headers["content-type"] == "text/event-stream"
        pieces = [piece async for piece in response.pieces()]
    assert b"".join(data for _, data in pieces) == b"".join(b"data: %d\n\n" % number for number in range(4))
    times = [when for when, _ in pieces]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(pieces) == 4
    assert all(gap > 0.1 for gap in gaps), gaps


async def test_small_events_are_not_held_back(edge: Edge) -> None:
    """Nagle's algorithm with delayed acknowledgements would show as 40 ms in each of several tries."""
    delays_s = []
    for _ in range(_TRIES):
        async with request(edge.port, "POST", CHAT, script(events=1, hold=True)) as response:
            start = time.monotonic()
            await anext(response.pieces())
            delays_s.append(time.monotonic() - start)
        if delays_s[-1] < _HELD_BACK_S:
            break
    assert min(delays_s) < _HELD_BACK_S, delays_s


async def test_a_client_that_goes_away_cancels_the_call(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, script(events=1, hold=True)) as response:
        await anext(response.pieces())
    async with asyncio.timeout(60):
        await gateway.openai.cancelled.wait()


async def test_get_routes(edge: Edge) -> None:
    for path, expected in {
        "/v1/models": {"object": "list"},
        "/v1/models/org/name": {"id": "org/name"},
        "/v1/models/smollm2-135m": {"id": "smollm2-135m"},
        "/v1/models?unknown=1": {"object": "list"},
        "/healthz": {"status": "ok"},
    }.items():
        async with request(edge.port, "GET", path) as response:
            assert (response.status, json.loads(await response.body())) == (200, expected), path


@pytest.mark.parametrize(
    ("name", "bad", "good", "status"),
    [
        ("grpc-timeout", "abc", "5S", 400),
        ("grpc-timeout", "-1S", "5S", 400),
        ("grpc-timeout", "1", "5S", 400),
        ("grpc-timeout", "123456789S", "5S", 400),
        ("grpc-encoding", "foo", "identity", 200),
        ("grpc-encoding", "gzip", "identity", 200),
        ("grpc-previous-rpc-attempts", "abc", "1", 200),
        ("grpc-retry-pushback-ms", "abc", "1", 200),
        ("grpc-internal-encoding-request", "q", "gzip", 200),
        ("grpc-status", "abc", "0", 200),
        ("grpc-trace-bin", "!!!", "AAAA", 200),
        ("grpc-tags-bin", "%%", "AAAA", 200),
        ("endpoint-load-metrics-bin", "!!", "AAAA", 200),
        ("any-bin", "a", "AAAA", 200),
    ],
)
async def test_a_header_that_grpc_cannot_parse_harms_nobody_else(
    edge: Edge, name: str, bad: str, good: str, status: int
) -> None:
    """The connection to a gateway is shared, and so is its header table."""
    for value, expected in ((good, 200), (bad, status), (good, 200), (bad, status), (good, 200)):
        async with request(edge.port, "POST", CHAT, script(), {name: value}) as response:
            body = await response.body()
            assert response.status == expected, (name, value, body)
            if expected == 400:
                assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_large_headers_pass_or_are_refused_as_too_large(edge: Edge) -> None:
    for size, expected in ((1_000, 200), (12_000, 200), (20_000, 200), (50_000, 200), (70_000, 431)):
        async with request(edge.port, "POST", CHAT, script(), {"authorization": "k" * size}) as response:
            assert response.status == expected, size


@pytest.mark.parametrize(
    ("grpc_status", "http_status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("UNAUTHENTICATED", 401),
        ("NOT_FOUND", 404),
        ("RESOURCE_EXHAUSTED", 429),
        ("INTERNAL", 500),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
    ],
)
async def test_the_gateways_error_is_the_body(edge: Edge, grpc_status: str, http_status: int) -> None:
    body = script(fail=grpc_status, error={"message": 'a "quoted" \u00e9 reason', "code": "why"}, retry_after="7")
    async with request(edge.port, "POST", CHAT, body) as response:
        assert response.status == http_status
        assert response.headers["content-type"] == "application/json"
        assert response.headers["retry-after"] == "7"
        assert not {"x-openai-error", "grpc-status", "grpc-message"} & set(response.headers)
        error = await response.error()
        assert (error["message"], error["code"]) == ('a "quoted" \u00e9 reason', "why")


@pytest.mark.parametrize("error", [{"message": "late", "code": "why"}, None])
async def test_a_failure_after_headers_keeps_its_details(edge: Edge, error: dict[str, str] | None) -> None:
    fields = {"error": error, "retry_after": "7"} if error else {}
    async with request(edge.port, "POST", CHAT, script(fail="UNAVAILABLE", begun=True, **fields)) as response:
        assert response.status == 503
        assert response.headers["x-kvmesh-worker"] == "worker-0"
        assert response.headers["retry-after"] == ("7" if error else "1")
        assert (await response.error())["code"] == ("why" if error else "service_unavailable")
    assert "outside of proper scope" not in edge.log.read_text()


@pytest.mark.parametrize(("grpc_status", "http_status"), [("RESOURCE_EXHAUSTED", 429), ("UNKNOWN", 500)])
async def test_an_error_without_details_gets_the_shape(edge: Edge, grpc_status: str, http_status: int) -> None:
    async with request(edge.port, "POST", CHAT, script(fail=grpc_status)) as response:
        assert response.status == http_status
        assert ("retry-after" in response.headers) == (http_status == 429)
        await response.error()


async def test_a_unary_methods_error_too(edge: Edge) -> None:
    async with request(edge.port, "GET", "/v1/models/missing") as response:
        assert response.status == 404
        assert (await response.error())["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/unknown"),
        ("GET", CHAT),
        ("POST", "/kvmesh.v1.OpenAI/ChatCompletions"),
        ("POST", "/kvmesh.v1.Inference/Generate"),
        ("POST", "/kvmesh.v1.Router/Describe"),
    ],
)
async def test_unknown_paths_are_404_in_the_shape(edge: Edge, method: str, path: str) -> None:
    async with request(edge.port, method, path, b"{}" if method == "POST" else b"") as response:
        assert response.status == 404
        assert response.headers["content-type"] == "application/json"
        assert (await response.error())["type"] == "invalid_request_error"


async def test_a_body_up_to_the_limit_passes(edge: Edge) -> None:
    body = script(size=1, filler="x" * (15 * 2**20))
    async with request(edge.port, "POST", CHAT, body) as response:
        assert (response.status, json.loads(await response.body())) == (200, {"length": len(body)})


async def test_a_body_beyond_it_is_413(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, b"x" * (20 * 2**20)) as response:
        assert response.status == 413
        assert (await response.error())["code"] == "request_too_large"
    assert gateway.openai.calls == 0


async def test_bytes_that_are_not_utf8_reach_the_gateway(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, b'\xff\xfe{"\x80') as response:
        assert response.status == 400
        assert (await response.error())["message"] == "not JSON"
    assert gateway.openai.bodies == [b'\xff\xfe{"\x80']


async def test_the_mesh_token_does_not_come_in_from_outside(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, script(), {"x-kvmesh-token": "stolen"}) as response:
        assert response.status == 200
    assert "x-kvmesh-token" not in gateway.openai.metadata[0]


async def test_a_request_that_is_not_http_is_400(edge: Edge) -> None:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(b"POST /v1/models HTTP/1.1\r\ncontent-length: nonsense\r\nhost: mesh\r\n\r\n")
        response = await read_head(reader, writer)
        assert response.status == 400
        await response.error()
        writer.close()


async def test_a_body_that_never_comes_is_408(gateway: Gateway, tmp_path: Path) -> None:
    async with running_envoy(tmp_path, gateway.address, body_timeout_s=0.3) as edge, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: mesh\r\ncontent-length: 10\r\n\r\n{{".encode())
        response = await read_head(reader, writer)
        assert response.status == 408
        assert (await response.error())["type"] == "timeout_error"
        writer.close()


async def test_content_stays_out_of_the_access_log(edge: Edge) -> None:
    async with request(edge.port, "POST", CHAT + "?key=hidden", script(secret="hidden")) as response:
        await response.body()
    async with asyncio.timeout(60):
        while not (entries := log_events(edge.log.read_text(), CHAT)):
            await asyncio.sleep(0.1)
    entry = entries[0]
    assert (entry["path"], entry["status"], entry["event"]) == (CHAT, 200, "http")
    assert "hidden" not in edge.log.read_text()


TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


async def test_without_a_collector_the_trace_context_passes_as_it_is(edge: Edge, gateway: Gateway) -> None:
    async with request(edge.port, "POST", CHAT, script(), {"traceparent": TRACEPARENT}) as response:
        assert response.status == 200
    assert gateway.openai.metadata[0]["traceparent"] == TRACEPARENT


async def test_with_a_collector_envoy_joins_the_trace(gateway: Gateway, tmp_path: Path) -> None:
    collector = Address("127.0.0.1", free_port())
    async with running_envoy(tmp_path, gateway.address, otlp=collector) as edge:
        async with request(edge.port, "POST", CHAT, script(), {"traceparent": TRACEPARENT}) as response:
            assert response.status == 200
    _, trace_id, parent_id, flags = gateway.openai.metadata[0]["traceparent"].split("-")
    assert (trace_id, flags) == (TRACE_ID, "01")
    assert parent_id != TRACEPARENT.split("-")[2]
