"""Log probabilities of a prompt on the real model: the same bits in any batch, cut anywhere, over a warm cache."""

from __future__ import annotations

import torch

from services.worker.engine.sampled import Sampled
from services.worker.messages import PromptScored, Sampling
from services.worker.model.runner import CpuRunner
from tests.worker.cores import submit
from tests.worker.model.steps import Chunk, run
from tests.worker.model.test_speculation import SPAN, core
from tests.worker.test_prompt_logprobs import run as run_core

PROMPT = [*SPAN * 5, *range(300, 330)]
SCORED = Sampling(temperature=0.0, num_prompt_logprobs=3)


def scores(runner: CpuRunner, *, beside: int, warm: bool) -> list[tuple[float, list[tuple[int, float]], int]]:
    served = core(runner, 8)
    if warm:
        served.handle(submit(1, PROMPT, 2), 0.0)
        run_core(served, Sampled(runner))
    for key in range(2, 2 + beside):
        served.handle(submit(key, PROMPT[key * 7 :], 4), 0.0)
    served.handle(submit(9, PROMPT, 4, sampling=SCORED), 0.0)
    said = run_core(served, Sampled(runner))
    told = [one for message in said if isinstance(message, PromptScored) for one in message.logprobs]
    return [(one.logprob, one.top, one.rank) for one in told]


def test_neither_batch_nor_cache_changes_them(runner_bf16: CpuRunner) -> None:
    alone = scores(runner_bf16, beside=0, warm=False)
    assert len(alone) == len(PROMPT) - 1
    logits = run(runner_bf16, Chunk(PROMPT, 0, list(range(20))))
    expected = torch.log_softmax(logits, -1)
    assert [one[0] for one in alone] == [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
    best = expected[:-1].topk(3)
    assert [[token for token, _ in one[1]] for one in alone] == best.indices.tolist()
    assert scores(runner_bf16, beside=3, warm=False) == alone
    assert scores(runner_bf16, beside=2, warm=True) == alone
