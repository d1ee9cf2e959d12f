"""The gateway as a process: start, ready file, API keys, metrics, SIGTERM during a stream, wrong settings."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.api.httpbody_pb2 import HttpBody
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvmesh.v1.openai_pb2_grpc import OpenAIStub

from services.common.bearer_keys import hash_key
from services.common.rpc import open_channel
from services.gateway.text.text_model import TextModel
from tests.gateway.conftest import ANSWER
from tests.gateway.fakes import FakeRouter, FakeWorker, Script
from tests.support.log_lines import log_events
from tests.support.processes import clean_environment
from tests.support.waiting import eventually


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "services.gateway", *flags]


def _text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read(), "utf-8")


async def test_life_of_a_process(text_model: TextModel, tmp_path: Path) -> None:
    script = Script(text_model.encode_text(ANSWER), pause_s=0.05)
    worker, router = FakeWorker("w0", lambda _: script), FakeRouter()
    router.workers["w0"] = await worker.start()
    keys, ready = tmp_path / "keys", tmp_path / "ready.json"
    keys.write_text(f"{hash_key('kvm-test')} acme\n")
    flags = ["--routers", await router.start(), "--keys-file", str(keys), "--ready-file", str(ready)]
    environment = clean_environment(KVMESH_MESH_SECRET="a secret for tests only")
    process = subprocess.Popen(command(*flags), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        await eventually(ready.is_file)
        started = json.loads(ready.read_text())
        channel = open_channel(started["address"])
        stub = OpenAIStub(channel)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        body = HttpBody(data=json.dumps({"model": "smollm2-135m", "prompt": "hi", "stream": True}).encode())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Completions(body).read()
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        call = stub.Completions(body, metadata=(("authorization", "Bearer kvm-test"),), wait_for_ready=True)
        await call.initial_metadata()
        assert router.asks[0].tenant == "acme"
        metrics = await asyncio.to_thread(_text_of, f"http://{started['metrics']}/metrics")
        assert "\nkvmesh_gateway_inflight_requests" in metrics
        refused = [line for line in metrics.splitlines() if line.startswith("kvmesh_gateway_requests_total{")]
        assert [line for line in refused if 'code="UNAUTHENTICATED"' in line and line.endswith(" 1.0")]
        left = stub.Completions(body, metadata=(("authorization", "Bearer kvm-test"),))
        await left.initial_metadata()
        left.cancel()
        process.send_signal(signal.SIGTERM)
        assert b"[DONE]" in b"".join([message.data async for message in call])
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), 30) == 0
        assert process.stderr is not None
        log = await asyncio.to_thread(process.stderr.read)
        access = log_events(log, '"request"')
        assert sorted((line["code"], line["tenant"]) for line in access) == [("CANCELLED", "acme"), ("OK", "acme")]
        assert all(line["trace_id"] and line["span_id"] and line["request_id"] for line in access)
        refusals = log_events(log, '"refused"')
        assert [(line["code"], line["error"]) for line in refusals] == [("UNAUTHENTICATED", "AuthenticationFailed")]
        assert "Paris" not in log
        await channel.close(None)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
        await worker.server.stop(0)
        await router.server.stop(0)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--models", "no-such-model"], "no-such-model"),
        (["--keys-file", "/no/such/file"], "keys_file"),
        (["--stall-timeout-s", "-1"], "stall_timeout_s"),
    ],
)
def test_wrong_settings_end_the_start_with_one_line(flags: list[str], named: str) -> None:
    environment = clean_environment(KVMESH_MESH_SECRET="a secret for tests only")
    ended = subprocess.run(command(*flags), env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("kvmesh:")]
    assert len(lines) == 1
    assert named in lines[0]
    assert "Traceback" not in ended.stderr
