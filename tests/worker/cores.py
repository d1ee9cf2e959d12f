"""Engine cores with limits for tests, messages to them, and running them to the end."""

from __future__ import annotations

import numpy as np

from services.common.blocks import BlockId, chain_block_ids
from services.worker.adapters.source import AdapterSource
from services.worker.admission import SchedulerLimits
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.following import GrammarSource
from services.worker.link_rates import LinkRates
from services.worker.messages import KnownOutput, Sampling, StepOutput, Submit
from services.worker.pushes import PushPolicy
from services.worker.rates import Rates
from services.worker.sampler import draw_tokens
from services.worker.transfers import TransferLimits
from tests.worker.toy import VOCAB, ToyRunner

KEY = b"k" * 32
ROOT = BlockId(b"r" * 16)
NUM_BLOCKS = 24
CONTEXT = 256


def submit(key: int, prompt: list[int], max_tokens: int, **changes: object) -> Submit:
    fields: dict[str, object] = {
        "request_id": f"r{key}",
        "block_root": bytes(ROOT),
        "prompt_block_ids": b"".join(chain_block_ids(KEY, ROOT, prompt)),
        "owner_digest": b"o" * 16,
        "sampling": Sampling(temperature=0.0),
        "num_choices": 1,
        "stop_token_ids": [],
        "pull_plan": [],
        "priority": 1,
        "expected_local_blocks": 0,
        "deadline_s": 1000.0,
        "traceparent": "",
    }
    fields |= changes
    return Submit(key=key, prompt=np.array(prompt, dtype="<u4").tobytes(), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def known_output(choice: int, tokens: list[int], *, finished: bool = False) -> KnownOutput:
    return KnownOutput(choice, np.array(tokens, dtype="<u4").tobytes(), finished)


def make_core(
    num_blocks: int = NUM_BLOCKS,
    *,
    budget: int = 40,
    max_running: int = 5,
    cache: bool = True,
    max_queue_s: float = 0.5,
    push_policy: PushPolicy = "write_through",
    grammars: GrammarSource | None = None,
    speculation_tokens: int = 0,
    adapters: AdapterSource | None = None,
) -> EngineCore:
    limits = CoreLimits(
        SchedulerLimits(
            CONTEXT,
            VOCAB,
            max_running=max_running,
            max_queue_s=max_queue_s,
            prefix_cache=cache,
            speculation_tokens=speculation_tokens,
            speculation_rows=64,
        ),
        TransferLimits(max_push_blocks=6, max_served_blocks=6, push_policy=push_policy),
        step_token_budget=budget,
        target_step_s=1.0,
    )
    return EngineCore(limits, num_blocks, KEY, Rates(1000.0, 0.01), LinkRates(1000), grammars, adapters)


def run_to_end(core: EngineCore, runner: ToyRunner) -> dict[int, list[int]]:
    """Step until nothing is left; tokens by key."""
    builder, outputs = StepBuilder(), {}
    for step in range(5000):
        chunks = core.schedule(float(step))
        if not chunks:
            break
        runner.submit(builder.build(chunks))
        core.commit(chunks, draw_tokens(runner.collect(), EngineCore.draw_rows(chunks)), 0.01, float(step))
        for message in core.to_front:
            if isinstance(message, StepOutput):
                for output in message.choices:
                    outputs.setdefault(output.key, []).extend(output.token_ids)
        core.to_front.clear()
    assert core.is_idle
    return outputs
