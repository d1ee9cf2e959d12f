"""The engine's loop over real sockets with the toy model."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.engine.benchmark import measure
from services.worker.engine.loop import MAX_FAILED_STEPS, EngineLoop
from services.worker.engine.sampled import Sampled
from services.worker.engine_messages import (
    BlockChanges,
    DrainEngine,
    EngineLoad,
    FromEngineToFront,
    FromFrontToEngine,
    PushTarget,
)
from services.worker.ipc import Link, wait_links
from services.worker.messages import (
    Abort,
    AdmittedRequest,
    ChoiceOutput,
    HolderRun,
    Message,
    RequestFailed,
    RequestUsage,
    Sampling,
    StepOutput,
)
from services.worker.mover_messages import (
    FromEngineToMover,
    FromMoverToEngine,
    PullBlocks,
    PullDone,
    PushBlocks,
)
from tests.worker.cores import make_core, submit
from tests.worker.toy import VOCAB, ToyRunner, expected_tokens, prefix_entries


@dataclass
class Engine:
    """A loop in a thread and the other ends of its links."""

    front: Link[Message]
    mover: Link[Message]
    runner: ToyRunner
    thread: threading.Thread
    failure: list[BaseException]

    def __post_init__(self) -> None:
        self.seen: list[Message] = []

    def until(self, condition: Callable[[list[Message]], object], within_s: float = 60.0) -> None:
        """Collect the front's messages until `condition` holds for all so far."""
        deadline_s = time.monotonic() + within_s
        while not condition(self.seen):
            assert time.monotonic() < deadline_s, self.seen
            wait_links([self.front], 0.05)
            self.seen += self.front.receive()

    def outputs(self, key: int) -> list[ChoiceOutput]:
        """Outputs of a request so far."""
        steps = [message for message in self.seen if isinstance(message, StepOutput)]
        return [output for step in steps for output in step.choices if output.key == key]

    def usage(self, key: int) -> RequestUsage | None:
        """Terminal message of a request that ran to its end."""
        steps = [message for message in self.seen if isinstance(message, StepOutput)]
        return next((usage for step in steps for usage in step.completed if usage.key == key), None)

    def failed(self, key: int) -> RequestFailed | None:
        """Terminal message of a request that failed."""
        return next((m for m in self.seen if isinstance(m, RequestFailed) and m.key == key), None)


@contextlib.contextmanager
def running_engine(num_blocks: int = 64, runner: ToyRunner | None = None) -> Iterator[Engine]:
    front_end, front = socket.socketpair()
    mover_end, mover = socket.socketpair()
    core = make_core(num_blocks, budget=64, max_running=16)
    runner = ToyRunner(num_blocks) if runner is None else runner
    front_link: Link[Message] = Link(front, FromFrontToEngine)
    mover_link: Link[Message] = Link(mover, FromMoverToEngine)
    loop = EngineLoop(core, Sampled(runner), front_link, mover_link)
    failure: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except (ConnectionError, RuntimeError) as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Engine(Link(front_end, FromEngineToFront), Link(mover_end, FromEngineToMover), runner, thread, failure)
    finally:
        front_end.close()
        mover_end.close()
        thread.join(30)
        front.close()
        mover.close()
        assert not thread.is_alive()
        core.pool.check()


def test_generates_and_reports() -> None:
    prompt = list(range(50))
    with running_engine() as engine:
        engine.front.send(submit(1, prompt, 20))
        engine.until(lambda _: engine.usage(1))
        assert [token for o in engine.outputs(1) for token in o.token_ids] == expected_tokens(tuple(prompt), 20)
        assert engine.outputs(1)[-1].finish == "length"
        assert isinstance(next(m for m in engine.seen if not isinstance(m, EngineLoad)), AdmittedRequest)
        assert any(isinstance(message, BlockChanges) for message in engine.seen)
        engine.front.send(submit(2, prompt, 20))
        engine.until(lambda _: engine.usage(2))
        usage = engine.usage(2)
        assert usage is not None
        assert usage.cached_local == 48
        # Loads go on while nothing happens.
        count = len(engine.seen)
        engine.until(lambda seen: len(seen) >= count + 3)
        load = engine.seen[-1]
        assert isinstance(load, EngineLoad)
        assert (load.running_requests, load.referenced_blocks, load.free_blocks) == (0, 0, 64)


class HeldRunner(ToyRunner):
    """Its steps end when they are let go, one by one."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.let_go = threading.Semaphore(0)

    def collect(self) -> torch.Tensor:
        assert self.let_go.acquire(timeout=30)
        return super().collect()


def test_what_a_step_brought_leaves_while_the_next_computes() -> None:
    runner = HeldRunner(64)
    with running_engine(runner=runner) as engine:
        engine.front.send(submit(1, [1, 2, 3], 4))
        engine.until(lambda seen: any(isinstance(message, AdmittedRequest) for message in seen))
        for number in range(1, 4):
            assert len(engine.outputs(1)) == number - 1
            runner.let_go.release()
            engine.until(lambda _, number=number: len(engine.outputs(1)) == number)
        runner.let_go.release()
        engine.until(lambda _: engine.usage(1))


@pytest.mark.parametrize("part", ["fail_next", "fail_collect"])
def test_a_failing_step_fails_its_requests_alone(part: str) -> None:
    with running_engine() as engine:
        setattr(engine.runner, part, True)
        engine.front.send(submit(1, [1, 2, 3], 5))
        engine.until(lambda _: engine.failed(1))
        failure = engine.failed(1)
        assert failure is not None
        assert failure.code == "INTERNAL"
        engine.front.send(submit(2, [1, 2, 3], 5))
        engine.until(lambda _: engine.usage(2))


def test_a_runner_that_never_works_ends_the_engine() -> None:
    with running_engine() as engine:
        for key in range(1, MAX_FAILED_STEPS + 1):
            engine.runner.fail_next = True
            engine.front.send(submit(key, [1, 2, 3], 5))
            engine.until(lambda _, key=key: engine.failed(key))
        engine.thread.join(30)
        assert isinstance(engine.failure[0], RuntimeError)


def test_aborts_deadlines_and_drain() -> None:
    with running_engine() as engine:
        engine.front.send(submit(1, list(range(30)), 200))
        engine.until(lambda _: engine.outputs(1))
        engine.front.send(Abort(1))
        engine.front.send(submit(2, [5, 6], 3, deadline_s=-1.0))
        engine.until(lambda _: engine.failed(2))
        failure = engine.failed(2)
        assert failure is not None
        assert failure.code == "DEADLINE_EXCEEDED"
        engine.front.send(DrainEngine())
        engine.front.send(submit(3, [5, 6], 3))
        engine.until(lambda _: engine.failed(3))
        refusal = engine.failed(3)
        assert refusal is not None
        assert refusal.code == "UNAVAILABLE"
        engine.until(lambda seen: isinstance(seen[-1], EngineLoad) and seen[-1].referenced_blocks == 0)
        assert engine.usage(1) is None


def test_a_deadline_ends_a_running_request() -> None:
    with running_engine() as engine:
        plan = [HolderRun("kvstore", "n", 1, "a", "b", 0, 3)]
        engine.front.send(submit(1, list(range(60)), 10, pull_plan=plan, deadline_s=0.2))
        engine.until(lambda _: engine.failed(1))
        failure = engine.failed(1)
        assert failure is not None
        assert failure.code == "DEADLINE_EXCEEDED"


def test_pulls_arrive_and_blocks_are_pushed() -> None:
    prompt = [(7 * i) % VOCAB for i in range(70)]
    with running_engine() as engine:
        engine.front.send(PushTarget("node", 1, "a", "b"))
        plan = [HolderRun("kvstore", "node", 1, "a", "b", 0, 3)]
        engine.front.send(submit(1, prompt, 10, pull_plan=plan))
        # Others go on while it waits.
        engine.front.send(submit(2, list(range(20)), 10))
        engine.until(lambda _: engine.usage(2))
        pull = next(message for message in engine.mover.receive() if isinstance(message, PullBlocks))
        assert len(pull.slots) == 3
        entries = np.array(prefix_entries(prompt)[:48]).reshape(3, 16)
        engine.runner.kv[pull.slots[:2]] = entries[:2]
        engine.mover.send(PullDone(pull.key, 2, ["ram", "ram"], "short"))
        engine.until(lambda _: engine.usage(1))
        usage = engine.usage(1)
        assert usage is not None
        assert usage.cached_ram == 32
        assert usage.pull_s > 0
        assert [token for o in engine.outputs(1) for token in o.token_ids] == expected_tokens(tuple(prompt), 10)
        pushes = [message for message in engine.mover.receive() if isinstance(message, PushBlocks)]
        assert pushes
        assert not any(push.starts_chain for push in pushes), "the pulled start is in the kvstore already"


def test_messages_that_make_no_sense_fail_alone() -> None:
    with running_engine() as engine:
        engine.front.send(submit(1, [1, 2], 4, prompt_block_ids=b"xyz"))
        engine.until(lambda _: engine.failed(1))
        engine.front.send(submit(2, [1, 2], 4, sampling=Sampling(temperature=0.0, logit_bias={10**6: 1.0})))
        engine.until(lambda _: engine.failed(2))
        engine.mover.send(PullDone(99, 5, [], ""))
        engine.front.send(submit(3, [1, 2], 4))
        engine.until(lambda _: engine.usage(3))


def test_the_benchmark_goes_through_the_runner() -> None:
    runner = ToyRunner(4)
    speed = measure(runner, num_blocks=4, max_context=64, vocab_size=VOCAB)
    assert speed.prefill_tokens_per_s > 0
    assert speed.decode_step_s > 0
    assert runner.steps == 7


def test_a_closed_front_ends_the_loop() -> None:
    with running_engine() as engine:
        engine.front.socket.close()
        engine.thread.join(30)
        assert isinstance(engine.failure[0], ConnectionError)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 200])
def test_prompts_around_block_borders(num_tokens: int) -> None:
    prompt = [(3 * i) % VOCAB for i in range(num_tokens)]
    with running_engine() as engine:
        for key in (1, 2):
            engine.front.send(submit(key, prompt, 18))
            engine.until(lambda _, key=key: engine.usage(key))
            tokens = [token for output in engine.outputs(key) for token in output.token_ids]
            assert tokens == expected_tokens(tuple(prompt), 18)
