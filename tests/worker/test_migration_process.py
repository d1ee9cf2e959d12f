"""A running attempt moves between two real workers as a gateway would move it, with the tokens of one that stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvmesh.v1 import common_pb2, worker_pb2

from tests.support.valkey import Valkey
from tests.support.waiting import eventually
from tests.worker.replica import running_worker
from tests.worker.test_process import prompt
from tests.worker.test_serve import Stream
from tests.worker.test_transfers_process import pull_step, registry

MAX_TOKENS = 200
SAMPLING = common_pb2.SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.2)


async def test_a_running_attempt_moves(tmp_path: Path, valkey: Valkey) -> None:
    tokens = prompt(150)
    async with (
        registry(valkey.url) as watcher,
        running_worker(tmp_path / "a", valkey.url, "--instance", "a", threads=1) as here,
        running_worker(tmp_path / "b", valkey.url, "--instance", "b", threads=1) as there,
    ):
        await eventually(lambda: {"worker/a", "worker/b"} <= watcher.records.keys())
        whole = await here.generate(tokens, MAX_TOKENS, sampling=SAMPLING, block_root=b"", prompt_block_ids=b"")
        source, target = Stream(here), Stream(there)
        await source.start(1, tokens, MAX_TOKENS, sampling=SAMPLING)
        await source.read_until(lambda: len(source.tokens(1)) >= 20)
        known = source.tokens(1)
        plan = [pull_step(watcher.records["worker/a"], (len(tokens) + len(known)) // 16)]
        outputs = [worker_pb2.KnownOutput(token_ids=known)]
        await target.start(1, tokens, MAX_TOKENS, sampling=SAMPLING, known=outputs, hold_s=60.0, pull_plan=plan)
        # The source draws on all the while.
        reading = asyncio.create_task(source.read_until(lambda: False, within_s=60))
        await target.read_until(lambda: any(event.HasField("prepared") for event in target.events.get(1, [])))
        further = source.tokens(1)[len(known) :]
        await source.cancel(1)
        await target.resume(1, {0: further})
        await target.read_until(lambda: 1 in target.ends)
        reading.cancel()
        assert 1 not in source.ends, "it moved while it ran"
        assert known + further + target.tokens(1) == whole.tokens[0]
        usage = target.events[1][-1].completed.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(tokens), MAX_TOKENS)
        assert usage.cached.peer >= 144, there.log()
        await here.wait_idle()
        await there.wait_idle()
