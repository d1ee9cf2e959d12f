"""Commands as a person types them: what goes wrong is one line and a status, and nothing stays behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import clean_environment


def kvmesh(*arguments: str, state: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env=clean_environment(KVMESH_STATE=str(state), **environment),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_taken_port_is_named(tmp_path: Path, taken_port: int, detach: tuple[str, ...]) -> None:
    result = kvmesh("up", "--http-port", str(taken_port), *detach, state=tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"kvmesh: port {taken_port} on 127.0.0.1 is taken (--http-port)\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("--model", "/no/such.gguf"), {}, "model='/no/such.gguf'"),
        (("--workers", "0"), {}, "--workers=0"),
        (("--redis", "redis://:hidden@127.0.0.1:1/0"), {}, "Redis at 127.0.0.1:1/0 does not answer"),
        ((), {"KVMESH_CONFIG": "/no/such.toml"}, "configuration file /no/such.toml"),
        ((), {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector"}, "OTLP endpoint"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    result = kvmesh("up", "--http-port", "1234", *arguments, state=tmp_path, **environment)
    assert result.returncode == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hidden" not in result.stderr


@pytest.mark.parametrize("command", [("ps",), ("ps", "--json"), ("down",), ("ctl", "workers"), ("logs", "worker-0")])
def test_without_a_mesh_every_command_says_so(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = kvmesh(*command, state=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("kvmesh: no ")
    assert result.stderr.count("\n") == 1


def test_help_lists_the_commands(tmp_path: Path) -> None:
    listed = kvmesh("--help", state=tmp_path).stdout
    for command in (
        "up",
        "down",
        "ps",
        "logs",
        "chat",
        "bench",
        "doctor",
        "ctl",
        "gateway",
        "router",
        "kvstore",
        "worker",
    ):
        assert f" {command} " in listed


class StreamingApi(BaseHTTPRequestHandler):
    """Lists two models; answers with the question in pieces, or with an error for the model "missing"."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "missing":
            answer = json.dumps({"error": {"message": "no model 'missing'"}}).encode()
            self.send_response(404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.send_response(200)
        self.end_headers()
        question = body["messages"][-1]["content"]
        words = [json.dumps(body)] if question == "echo" else question.split()
        for word in words:
            delta = {"choices": [{"delta": {"content": word + " "}}]}
            self.wfile.write(f": comment\n\ndata: {json.dumps(delta)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StreamingApi)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_chat_answers_one_question(tmp_path: Path, api: str) -> None:
    result = kvmesh("chat", "say [these] words", "--url", api, state=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "say [these] words")


def test_chat_asks_the_first_served_model_with_its_own_sampling(tmp_path: Path, api: str) -> None:
    asked = json.loads(kvmesh("chat", "echo", "--url", api, state=tmp_path).stdout)
    assert (asked["model"], "temperature" in asked) == ("first", False)
    chosen = kvmesh("chat", "echo", "--model", "second", "--temperature", "0", "--url", api, state=tmp_path)
    asked = json.loads(chosen.stdout)
    assert (asked["model"], asked["temperature"]) == ("second", 0)


@pytest.mark.parametrize("question", [("hello",), ()])
def test_chat_without_a_mesh_is_one_line(tmp_path: Path, question: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    result = kvmesh("chat", *question, "--url", url, state=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"kvmesh: nothing listens on {url}: `kvmesh up` starts a mesh, --url or --state names another\n"
    )


def test_chat_shows_the_servers_error(tmp_path: Path, api: str) -> None:
    result = kvmesh("chat", "hello", "--model", "missing", "--url", api, state=tmp_path)
    assert (result.returncode, result.stderr) == (2, "kvmesh: no model 'missing' (HTTP 404)\n")


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    result = kvmesh("doctor", state=tmp_path)
    assert result.returncode == 0, result.stdout
    for part in ("machine", "torch", "ucxx", "compiler", "model", "envoy", "valkey"):
        assert f"ok   {part} " in result.stdout
