"""The forward pass computes what transformers computes, however the tokens arrive."""

from __future__ import annotations

import pytest
import torch

from services.worker.model.runner import CpuRunner

from .steps import Chunk, run, run_in_chunks

MAX_RELATIVE_ERROR = 1e-3
# BF16 keeps 8 bits. Over 30 layers that was measured as 0.004 in the mean and 0.07 for the worst of 150 tokens.
MEAN_ERROR_BF16 = 0.01
MAX_ERROR_BF16 = 0.15
SCATTERED = [17, 3, 55, 4, 40, 41, 2, 60, 9, 30]


def relative_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (logits - expected).norm(dim=-1) / expected.norm(dim=-1)


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_errors(logits, expected).max().item()


@pytest.fixture(params=["runner_f32", "torch_f32"])
def f32(request: pytest.FixtureRequest) -> CpuRunner:
    runner: CpuRunner = request.getfixturevalue(request.param)
    return runner


def test_whole_prompt(f32: CpuRunner, prompt: list[int], reference_logits: torch.Tensor) -> None:
    logits = run(f32, Chunk(prompt, 0, SCATTERED))
    assert relative_error(logits, reference_logits) < MAX_RELATIVE_ERROR
    worst = (logits - reference_logits).abs().max() / reference_logits.abs().max()
    assert worst.item() < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("sizes", [(1,), (7, 13, 1, 30), (16,), (33,)])
def test_chunked_prompt(
    runner_f32: CpuRunner, prompt: list[int], reference_logits: torch.Tensor, sizes: tuple[int, ...]
) -> None:
    logits = run_in_chunks(runner_f32, prompt, sizes, SCATTERED)
    assert relative_error(logits, reference_logits) < MAX_RELATIVE_ERROR


def test_prefix_of_existing_blocks(f32: CpuRunner, prompt: list[int], reference_logits: torch.Tensor) -> None:
    run(f32, Chunk(prompt[:80], 0, [20, 21, 22, 23, 24]))
    reused = [20, 21, 22, 23, 24, 5, 50, 6, 51, 7]
    logits = run(f32, Chunk(prompt[80:], 80, reused))
    assert relative_error(logits, reference_logits[80:]) < MAX_RELATIVE_ERROR


def test_mixed_batch(f32: CpuRunner, prompt: list[int], reference_logits: torch.Tensor) -> None:
    first, second = [1, 2, 3], [33, 8, 34, 9, 35]
    run(f32, Chunk(prompt[:40], 0, first))
    logits = run(f32, Chunk(prompt[40:41], 40, first), Chunk(prompt[:70], 0, second))
    expected = torch.cat((reference_logits[40:41], reference_logits[:70]))
    assert relative_error(logits, expected) < MAX_RELATIVE_ERROR


def test_long_context(runner_f32: CpuRunner, reference: torch.nn.Module) -> None:
    """Beyond one span of the attention kernel."""
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(5, 49000, (570,), generator=generator).tolist()
    table = list(range(299, 299 - 36, -1))
    run(runner_f32, Chunk(tokens[:560], 0, table), last_only=True)
    logits = run(runner_f32, Chunk(tokens[560:], 560, table))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), logits_to_keep=10).logits[0]
    assert relative_error(logits, expected) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("name", ["runner_bf16", "torch_bf16"])
def test_bf16_stays_close(
    request: pytest.FixtureRequest, name: str, prompt: list[int], reference_logits: torch.Tensor
) -> None:
    logits = run(request.getfixturevalue(name), Chunk(prompt, 0, SCATTERED))
    errors = relative_errors(logits, reference_logits)
    assert errors.mean().item() < MEAN_ERROR_BF16
    assert errors.max().item() < MAX_ERROR_BF16
