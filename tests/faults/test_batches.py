"""Batches on a mesh of which every service is killed: each line is answered once, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.mesh import MODEL, Mesh, scrape, total, wait_for
from tests.support.sim_mesh import running_sim_mesh

LINES, TOKENS = 60, 40
WITHIN_S = 150.0
# A batch may be over before its gateway is seen to run it and is killed: of so many one is not.
BATCHES = 4
VICTIMS = ("router-0", "valkey", "kvstore-0", "worker-0")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    options = ("--workers", "2", "--gateways", "2", "--routers", "2", "--kvstores", "1")
    with running_sim_mesh(*options, env={"KVMESH_GATEWAY_MAX_BATCH_LINES": "6"}) as running:
        yield running


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=8, timeout=60) as made:
        yield made


def line(number: int) -> str:
    body = {"model": MODEL, "prompt": f"Line {number} of the batch", "max_tokens": TOKENS}
    return json.dumps({"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions", "body": body})


def begin(client: openai.OpenAI) -> str:
    """The id of a batch of all lines."""
    data = "\n".join(line(number) for number in range(LINES)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "a test"}
    ).id


def answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def assert_each_line_once(client: openai.OpenAI, batch_id: str) -> None:
    """Wait for the end; then no line is missing, cut short or there twice."""
    wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", within_s=WITHIN_S, what="its end")
    over = client.batches.retrieve(batch_id)
    assert (over.error_file_id, over.metadata) == (None, {"of": "a test"})
    assert over.output_file_id is not None
    assert over.usage is not None
    results = [json.loads(text) for text in client.files.content(over.output_file_id).text.splitlines()]
    assert [result["custom_id"] for result in results] == [f"id {number}" for number in range(LINES)]
    tokens = [result["response"]["body"]["usage"]["completion_tokens"] for result in results]
    assert tokens == [TOKENS] * LINES
    assert over.usage.output_tokens == LINES * TOKENS


def running_gateway(gateways: list[dict[str, Any]]) -> int:
    """Process id of the one that runs a batch; 0 for none."""
    found = (
        entry["pid"] for entry in gateways if total(scrape(entry["metrics"]), "kvmesh_gateway_batch_running_lines")
    )
    return next(found, 0)


def test_each_line_is_answered_once_whoever_dies(mesh: Mesh, client: openai.OpenAI) -> None:
    mesh.wait_ready()
    pids = {entry["name"]: entry["pid"] for entry in mesh.ps()}
    batch_id = begin(client)
    for victim in VICTIMS:
        before = answered(client, batch_id)
        wait_for(lambda: answered(client, batch_id) > min(before, LINES - 1), within_s=WITHIN_S, what="progress")  # noqa: B023
        os.kill(pids[victim], signal.SIGKILL)
    assert_each_line_once(client, batch_id)
    assert "Line 7 of the batch" not in mesh.logs()


def test_another_gateway_goes_on_where_one_died(mesh: Mesh, client: openai.OpenAI) -> None:
    for _ in range(BATCHES):
        mesh.wait_ready()
        gateways = mesh.of_kind("gateway")
        batch_id = begin(client)
        pid = 0

        def is_run_or_over() -> bool:
            nonlocal pid
            pid = running_gateway(gateways) if answered(client, batch_id) else 0  # noqa: B023
            return pid > 0 or answered(client, batch_id) == LINES  # noqa: B023

        wait_for(is_run_or_over, within_s=WITHIN_S, what="a gateway that runs the batch, or its end")
        if pid:
            os.kill(pid, signal.SIGKILL)
        assert_each_line_once(client, batch_id)
        samples = [scrape(entry["metrics"]) for entry in mesh.of_kind("gateway") if entry["ready"]]
        if sum(total(found, "kvmesh_gateway_batch_takeovers_total") for found in samples):
            return
    raise AssertionError(f"no batch was taken over: {mesh.logs()[-4000:]}")
