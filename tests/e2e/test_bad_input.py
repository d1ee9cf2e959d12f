"""Bad input: one clear 4xx in the OpenAI shape each, and the mesh goes on answering."""

from __future__ import annotations

import contextlib
import json
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support.mesh import MODEL, Mesh

MESSAGES = [{"role": "user", "content": "Say hello."}]


def post(mesh: Mesh, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", mesh.port, timeout=60)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an oversized body is answered before its end
        connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2, **fields}).encode()


CASES: list[tuple[str, bytes, int, str | None]] = [
    ("invalid json", b'{"model": ', 400, None),
    ("empty body", b"", 400, None),
    ("a list", b"[]", 400, None),
    ("invalid utf-8", b'{"model": "smollm2-135m", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None),
    ("lone surrogate", b'{"model": "smollm2-135m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    ("no model", json.dumps({"messages": MESSAGES}).encode(), 400, "model"),
    ("no messages", json.dumps({"model": MODEL}).encode(), 400, "messages"),
    ("empty messages", chat(messages=[]), 400, "messages"),
    ("messages a string", chat(messages="hello"), 400, "messages"),
    ("content a number", chat(messages=[{"role": "user", "content": 7}]), 400, None),
    ("message without a role", chat(messages=[{"content": "x"}]), 400, None),
    ("image part", chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, None),
    ("unknown model", chat(model="nobody"), 404, "model"),
    ("model a number", chat(model=3), 400, "model"),
    ("max_tokens 0", chat(max_tokens=0), 400, "max_tokens"),
    ("max_tokens -1", chat(max_tokens=-1), 400, "max_tokens"),
    ("max_tokens 10^9", chat(max_tokens=10**9), 400, None),
    ("max_tokens 10^30", chat(max_tokens=10**30), 400, "max_tokens"),
    ("max_tokens text", chat(max_tokens="many"), 400, "max_tokens"),
    ("temperature -1", chat(temperature=-1), 400, "temperature"),
    ("temperature text", chat(temperature="hot"), 400, "temperature"),
    (
        "temperature NaN",
        b'{"model":"smollm2-135m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        400,
        None,
    ),
    ("top_p 0", chat(top_p=0), 400, "top_p"),
    ("top_p 2", chat(top_p=2), 400, "top_p"),
    ("n 0", chat(n=0), 400, "n"),
    ("n 10^6", chat(n=10**6), 400, "n"),
    ("top_logprobs 21", chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    ("logit_bias of a word", chat(logit_bias={"word": 1}), 400, "logit_bias"),
    ("logit_bias beyond the vocabulary", chat(logit_bias={"10000000": 1}), 400, "logit_bias"),
    ("stop empty", chat(stop=""), 400, "stop"),
    ("stop a number", chat(stop=3), 400, "stop"),
    ("stream text", chat(stream="yes"), 400, "stream"),
    ("tool name", chat(tools=[{"type": "function", "function": {"name": "a b"}}]), 400, "tools[0].function.name"),
    ("functions", chat(functions=[{"name": "f"}]), 400, "functions"),
    ("response_format", chat(response_format={"type": "yaml"}), 400, "response_format.type"),
    ("deep json", b'{"model":' + b"[" * 100_000, 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input(mesh: Mesh, body: bytes, status: int, param: str | None) -> None:
    got, answer = post(mesh, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in error["message"]


def test_large_body_is_413(mesh: Mesh) -> None:
    status, answer = post(mesh, chat(user="x" * 20_000_000))
    assert status == 413
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_large_body_within_the_limit_is_a_context_error(mesh: Mesh) -> None:
    status, answer = post(mesh, chat(messages=[{"role": "user", "content": "word " * 400_000}]))
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


def test_more_than_the_memory_map_s_largest_context(mesh: Mesh) -> None:
    """What `kvmesh ctl memory` calls the largest context is what is admitted, and not a token more."""
    workers = json.loads(mesh.kvmesh("ctl", "memory", "--json").stdout)
    assert len(workers) == 2
    largest = int(workers[0]["memory"]["largest_context"])
    body = json.dumps({"model": MODEL, "prompt": [5] * largest, "max_tokens": 1}).encode()
    status, answer = post(mesh, body, "/v1/completions")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(largest) in answer["error"]["message"]
    for worker in workers:
        memory = {name: int(value) for name, value in worker["memory"].items() if name != "device"}
        assert memory["kv_bytes"] == memory["num_blocks"] * memory["block_bytes"]
        assert largest == min(memory["max_context"], memory["kv_tokens"])


def test_token_id_beyond_the_vocabulary(mesh: Mesh) -> None:
    body = json.dumps({"model": MODEL, "prompt": [1, 10**6], "max_tokens": 2}).encode()
    status, answer = post(mesh, body, "/v1/completions")
    assert status == 400
    assert answer["error"]["param"] == "prompt"


def test_unknown_path_is_404(mesh: Mesh) -> None:
    status, answer = post(mesh, b"{}", "/v1/nothing")
    assert status == 404
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_the_mesh_goes_on(mesh: Mesh) -> None:
    for _, body, _, _ in CASES:
        post(mesh, body)
    status, answer = post(mesh, chat())
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert all(entry["ready"] for entry in mesh.ps())
