"""Redis is away, silent or dead, and everything that keeps accepted work alive goes on: rescues, moves and keys.

Simulated workers answer by a hash of the seed and the position, so that a wrong continuation shows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos_jobs import COMPLETIONS
from bench.chaos_streams import Answer, ask, difference
from tests.support.mesh import MODEL, Mesh, total
from tests.support.sim_mesh import running_sim_mesh
from tests.support.valkey import Valkey
from tests.support.waiting import eventually

STREAMS, TOKENS = 4, 600


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """Nobody starts it again."""
    with tempfile.TemporaryDirectory(prefix="kvm-") as folder:
        server = Valkey(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def mesh(valkey: Valkey) -> Iterator[Mesh]:
    with running_sim_mesh("--workers", "3", "--redis", valkey.url) as running:
        yield running


async def said(mesh: Mesh, answer: Answer, *, key: str = "", tokens: int = TOKENS) -> Answer:
    """A streamed request; what it says depends on the number of its job alone."""
    number = answer.job
    body = {"model": MODEL, "prompt": f"Story {number}", "max_tokens": tokens, "seed": number, "ignore_eos": True}
    headers = {"idempotency-key": f"{key} {number}"} if key else {}
    return await ask(mesh.port, COMPLETIONS, {**body, "stream": True}, answer, headers=headers)


@pytest.mark.parametrize("how", ["silent", "dead"])
async def test_accepted_work_goes_on(mesh: Mesh, valkey: Valkey, how: str) -> None:
    mesh.wait_ready()
    expected = await asyncio.gather(*(said(mesh, Answer(number)) for number in range(STREAMS)))
    assert [answer.error for answer in expected] == [""] * STREAMS
    workers = {entry["name"]: entry["pid"] for entry in mesh.of_kind("worker")}

    def gone_on() -> float:
        found = mesh.metrics("gateway-0")
        return total(found, "kvmesh_gateway_rescues_total") + total(found, "kvmesh_gateway_moves_total")

    gone_on_before = gone_on()
    answers = [Answer(number % STREAMS) for number in range(2 * STREAMS)]
    before = [asyncio.create_task(said(mesh, one, key=how if one.job % 2 == 0 else "")) for one in answers[:STREAMS]]
    if how == "silent":
        valkey.pause()
    else:
        valkey.kill()
    # Those that come now find nobody who knows their keys, nor where any block is.
    during = [asyncio.create_task(said(mesh, one, key=how)) for one in answers[STREAMS:]]
    await eventually(lambda: all(one.begun.is_set() for one in answers), 60.0, 0.02)
    # Two of three, those first that have work: where it went is the router's affair.
    killed, ended, *_ = sorted(workers, key=lambda name: -sum(one.worker == name and not one.done for one in answers))
    os.kill(workers[killed], signal.SIGKILL)
    os.kill(workers[ended], signal.SIGTERM)
    await asyncio.gather(*before, *during)
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert [difference(answer, expected[answer.job]) for answer in answers] == [""] * len(answers)
    assert gone_on() > gone_on_before
    later = await asyncio.gather(*(said(mesh, Answer(one), key=f"{how} later", tokens=20) for one in range(STREAMS)))
    assert [answer.error for answer in later] == [""] * STREAMS
    if how == "silent":
        valkey.resume()
    else:
        valkey.start()
    after = await said(mesh, Answer(0))
    assert (after.error, difference(after, expected[0])) == ("", "")
