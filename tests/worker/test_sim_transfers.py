"""Two simulated workers with movers: one pulls what the other takes its time to compute, and goes on in its place."""

from __future__ import annotations

from pathlib import Path

from kvmesh.v1 import common_pb2

from tests.support.mesh import total
from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import running_worker
from tests.worker.test_process import prompt
from tests.worker.test_serve import Stream
from tests.worker.test_transfers_process import pull_step, registry

FLAGS = ("--engine", "sim", "--sim-transfers", "true", "--num-blocks", "64", "--sim-prefill-tokens-per-s", "2000")
LENGTH, MAX_TOKENS = 325, 40


async def test_a_handoff_between_simulated_workers(tmp_path: Path, valkey: Valkey) -> None:
    async with (
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "p", valkey.url, *FLAGS, threads=0) as first,
        running_worker(tmp_path / "d", valkey.url, *FLAGS, "--instance", "d", threads=0) as second,
    ):
        await eventually(lambda: {"worker/w", "worker/d"} <= watcher.records.keys(), timeout_s=60)
        p, d, tokens = Stream(first), Stream(second), prompt(LENGTH)
        sampling = common_pb2.SamplingParams(seed=5)
        whole = (await second.generate(tokens, MAX_TOKENS, tenant="other", sampling=sampling)).tokens[0]
        step = pull_step(watcher.records["worker/w"], LENGTH // 16)
        step.wait_s = 20.0
        # A holder to which nobody has come yet is waited for only so long.
        await p.start(1, tokens, MAX_TOKENS, sampling=sampling)
        await p.read_until(lambda: bool(p.events.get(1)), within_s=60)
        await d.start(1, tokens, MAX_TOKENS, pull_plan=[step], hold_s=120.0, sampling=sampling)
        await d.read_until(lambda: _num_prepared(d) == 1, within_s=60)
        assert d.events[1][-1].prepared.takes_more
        await p.read_until(lambda: len(p.tokens(1)) >= 12, within_s=60)
        await p.cancel(1)
        assert p.tokens(1) == whole[: len(p.tokens(1))]
        await d.resume(1, {0: whole[:8]}, hold=True)
        await d.read_until(lambda: _num_prepared(d) == 2, within_s=60)
        assert not d.tokens(1)
        await d.resume(1, {0: whole[8:10]})
        await d.read_until(lambda: 1 in d.ends, within_s=60)
        assert d.tokens(1) == whole[10:]
        usage = d.events[1][-1].completed.usage
        assert usage.cached.peer == LENGTH // 16 * 16, second.log()
        assert usage.output_tokens == MAX_TOKENS
        await first.wait_idle()
        await second.wait_idle()
        await eventually(lambda: total(first.metrics(), "kvmesh_mover_open_leases") == 0, timeout_s=60)


def _num_prepared(stream: Stream) -> int:
    return sum(event.HasField("prepared") for event in stream.events.get(1, []))
