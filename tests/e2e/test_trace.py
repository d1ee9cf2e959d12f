"""One trace, exported to a real OTLP collector, spans the whole mesh under the client's trace id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.mesh import MODEL, running_mesh, wait_for
from tests.support.processes import free_port

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SERVICES = {"envoy", "kvmesh-gateway", "kvmesh-router", "kvmesh-worker", "kvmesh-kvstore"}


@contextmanager
def collector(log: Path) -> Iterator[str]:
    """A rotel agent that prints every span it receives; yields its OTLP gRPC endpoint."""
    import rotel

    binary = Path(rotel.__file__).with_name("rotel-agent")
    port, http_port = free_port(), free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(str(binary), "start", "--exporter", "blackhole"),
                *("--debug-log", "traces", "--debug-log-verbosity", "detailed"),
                *("--otlp-grpc-endpoint", f"127.0.0.1:{port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def services_of_trace(log: str) -> dict[str, set[str]]:
    """Span names of the client's trace by service, out of the collector's print."""
    found: dict[str, set[str]] = {}
    for resource in re.split(r"ResourceSpans? #", log):
        service = re.search(r"service\.name: (?:Str\()?\"?([\w-]+)", resource)
        for span in re.split(r"\bSpan #", resource)[1:]:
            name = re.search(r"Name\s*: (\S+)", span)
            if service and name and TRACE_ID in span:
                found.setdefault(service[1], set()).add(name[1])
    return found


def complete(url: str, prompt: str, traced: bool) -> None:
    headers = {"content-type": "application/json"}
    if traced:
        headers["traceparent"] = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=120) as response:
        response.read()


def test_one_trace_through_every_service(tmp_path: Path) -> None:
    pytest.importorskip("rotel")
    assert sys.platform == "linux"
    log = tmp_path / "collector.log"
    with collector(log) as endpoint:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "KVMESH_WORKER_NUM_BLOCKS": "64"}
        with running_mesh(tmp_path / "state", "--workers", "1", env=env) as mesh:
            prefix = "Once upon a time there was a mesh of machines. " * 12
            complete(mesh.url, prefix, traced=False)
            for number in range(8):  # other prompts, until the first one's blocks have left the worker's small pool
                complete(mesh.url, f"Number {number}: " + "The rain fell on the hill all day long. " * 14, traced=False)
            complete(mesh.url, prefix, traced=True)
            wait_for(lambda: set(services_of_trace(log.read_text())) >= SERVICES, within_s=60, what=str(SERVICES))
    spans = services_of_trace(log.read_text())
    assert {"admit", "tokenize", "route"} <= spans["kvmesh-gateway"]
    assert {"route"} <= spans["kvmesh-router"]
    assert {"queue", "pull", "prefill", "decode"} <= spans["kvmesh-worker"]
    assert "Once upon a time" not in log.read_text()
