"""Embeddings of the real model: transformers' hidden states, pooled; the same in any batch, cut or cached."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from services.worker.admission import SchedulerLimits
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.sampled import Sampled
from services.worker.link_rates import LinkRates
from services.worker.messages import PromptEmbedded, RequestFailed, StepOutput
from services.worker.model.runner import CpuRunner
from services.worker.rates import Rates
from tests.worker.cores import KEY, submit
from tests.worker.model.conftest import NUM_BLOCKS, SERVED_CONTEXT
from tests.worker.test_prompt_logprobs import run

Pooling = Literal["none", "mean", "last"]


def core(runner: CpuRunner, pooling: Pooling, *, num_blocks: int = NUM_BLOCKS, budget: int = 512) -> EngineCore:
    limits = SchedulerLimits(SERVED_CONTEXT, runner.spec.vocab_size, max_queue_s=1e9, pooling=pooling)
    links = LinkRates(runner.spec.layout.block_bytes)
    return EngineCore(CoreLimits(limits, step_token_budget=budget), num_blocks, KEY, Rates(1e6, 0.01), links)


def embedded(served: EngineCore, runner: CpuRunner, prompt: list[int], *, beside: int = 0) -> bytes:
    """The embedding of a prompt, in a batch with prompts that generate."""
    for key in range(2, 2 + beside):
        served.handle(submit(key, prompt[key * 5 :], 3), 0.0)
    served.handle(submit(1, prompt, 1, embeds=True), 0.0)
    said = run(served, Sampled(runner))
    (told,) = [message.values for message in said if isinstance(message, PromptEmbedded)]
    outputs = [message for message in said if isinstance(message, StepOutput)]
    assert not any(output.key == 1 for message in outputs for output in message.choices)
    (usage,) = [usage for message in outputs for usage in message.completed if usage.key == 1]
    assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt), 0)
    assert served.is_idle
    assert served.pool.statistics.referenced == 0
    return told


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_they_are_the_pooled_hidden_states_of_transformers(
    runner_f32: CpuRunner, reference: torch.nn.Module, prompt: list[int], pooling: Pooling
) -> None:
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]  # type: ignore[operator, union-attr]
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    expected = (pooled / pooled.norm()).numpy()
    found = np.frombuffer(embedded(core(runner_f32, pooling), runner_f32, prompt), "<f4")
    assert found.shape == (576,)
    assert float(np.abs(found - expected).max()) < 1e-4
    assert float(np.linalg.norm(found)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_neither_batch_nor_cache_nor_cuts_change_them(
    runner_bf16: CpuRunner, prompt: list[int], pooling: Pooling
) -> None:
    served = core(runner_bf16, pooling)
    alone = embedded(served, runner_bf16, prompt)
    assert embedded(served, runner_bf16, prompt) == alone, "over cached blocks"
    assert embedded(core(runner_bf16, pooling), runner_bf16, prompt, beside=3) == alone
    assert embedded(core(runner_bf16, pooling, budget=37), runner_bf16, prompt) == alone
    short = embedded(core(runner_bf16, pooling), runner_bf16, prompt[:1])
    assert len(short) == 4 * 576


def test_a_model_that_is_served_without_refuses(runner_bf16: CpuRunner) -> None:
    served = core(runner_bf16, "none")
    served.handle(submit(1, [5, 6], 1, embeds=True), 0.0)
    (failed,) = [message for message in served.to_front if isinstance(message, RequestFailed)]
    assert failed.code == "INVALID_ARGUMENT"
    assert "pooling" in failed.detail
