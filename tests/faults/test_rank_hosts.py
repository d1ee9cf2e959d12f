"""The network between a worker and the host of its second stage is cut: both end what they have of the replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.tiny_model import write_tiny_model
from tests.support.mesh import total
from tests.support.netns import Island
from tests.support.valkey import Valkey
from tests.support.waiting import PATIENCE_S, eventually
from tests.worker.rank_host.processes import running_rank_host
from tests.worker.replica import running_worker
from tests.worker.test_process import prompt

_SILENCE_S = 10.0


async def test_a_cut_network_ends_the_replica_on_both_sides(tmp_path: Path, valkey: Valkey, link: Island) -> None:
    model = write_tiny_model(tmp_path / "model")
    hosted = {"host": link.address, "within": link.within}
    async with running_rank_host(tmp_path / "host", "--models", f"tiny={model}", **hosted) as host:  # type: ignore[arg-type]
        flags = ("--model", f"tiny={model}", "--pipeline-parallel", "2", "--rank-hosts", host.address)
        flags += ("--listen", f"{link.outside}:0", "--child-silence-s", str(_SILENCE_S))
        async with running_worker(tmp_path / "w", valkey.url, *flags, threads=1) as worker:
            before = await worker.generate(prompt(40), 8)
            running = asyncio.create_task(worker.generate(prompt(40, 1), 3000))
            await eventually(lambda: total(worker.metrics(), "kvmesh_worker_running_requests") > 0)
            link.drop()
            assert not running.done()
            try:
                await asyncio.wait([running], timeout=PATIENCE_S)
                assert "UNAVAILABLE" in str(running.exception())
                assert await asyncio.to_thread(worker.process.wait, PATIENCE_S) == 1
                # Whichever is noticed first: that nothing comes, or that the connection is dead.
                await eventually(lambda: host.ends() in ({"silence": 1}, {"call broke": 1}))
            finally:
                link.mend()
        async with running_worker(tmp_path / "again", valkey.url, *flags, threads=1) as again:
            assert (await again.generate(prompt(40), 8)).tokens == before.tokens
