"""Exact mode: a token's logits are the same bits alone, in any batch, in any chunking, after any prefix hit."""

from __future__ import annotations

import pytest
import torch

from services.worker.model.runner import CpuRunner

from .steps import Chunk, run, run_in_chunks

TABLE = list(range(10))


@pytest.fixture(params=["runner_bf16", "runner_f32"])
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    loaded: CpuRunner = request.getfixturevalue(request.param)
    return loaded


@pytest.mark.parametrize("sizes", [(1,), (7,), (13,), (64,)])
def test_chunk_borders(runner: CpuRunner, prompt: list[int], sizes: tuple[int, ...]) -> None:
    tokens = prompt[:90]
    whole = run(runner, Chunk(tokens, 0, TABLE))
    assert torch.equal(run_in_chunks(runner, tokens, sizes, [60 - slot for slot in TABLE]), whole)


def test_batch_of_one_and_sixteen(runner: CpuRunner, prompt: list[int]) -> None:
    tables = [[3 * seq, 3 * seq + 1, 3 * seq + 2] for seq in range(16)]
    lengths = [1 + 2 * seq for seq in range(16)]
    prefills = [Chunk(prompt[seq : seq + lengths[seq]], 0, tables[seq]) for seq in range(16)]
    together = run(runner, *prefills, last_only=True)
    decodes = [Chunk([prompt[seq + 50]], lengths[seq], tables[seq]) for seq in range(16)]
    step = run(runner, *decodes)
    for seq in range(16):
        assert torch.equal(run(runner, prefills[seq], last_only=True)[0], together[seq])
        assert torch.equal(run(runner, decodes[seq])[0], step[seq])


@pytest.mark.parametrize("name", ["runner_bf16", "runner_f32"])
def test_long_context_alone_and_with_others(request: pytest.FixtureRequest, name: str, prompt: list[int]) -> None:
    """Alone, a long context is split over threads; beside others it is not."""
    runner: CpuRunner = request.getfixturevalue(name)
    tokens = (prompt * 5)[:700]
    long = list(range(100, 150))
    run(runner, Chunk(tokens, 0, long), last_only=True)
    decode = Chunk([99], 700, long)
    others = [Chunk(prompt[:5], 0, [seq]) for seq in range(20)]
    assert torch.equal(run(runner, decode)[0], run(runner, *others, decode, last_only=True)[-1])
    whole = run(runner, Chunk([*tokens, 99], 0, list(range(150, 200))), last_only=True)
    assert torch.equal(run(runner, decode), whole)


def test_any_number_of_rows(runner: CpuRunner, prompt: list[int]) -> None:
    """Through the whole model; tests/kernels/test_linear.py tries every count on the vocabulary head."""
    table = TABLE[:4]
    expected = run(runner, Chunk(prompt[:64], 0, table))
    for rows in [*range(1, 18), 23, 25, 31, 33, 48, 63]:
        start = 64 - rows
        logits = run(runner, Chunk(prompt[start:64], start, table))
        assert torch.equal(logits, expected[start:]), f"{rows} rows"


@pytest.mark.parametrize("name", ["runner_bf16", "runner_f32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads(
    request: pytest.FixtureRequest, name: str, prompt: list[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: CpuRunner = request.getfixturevalue(name)
    expected = run(runner, Chunk(prompt, 0, TABLE))
    monkeypatch.setattr(runner, "_num_threads", threads)
    assert torch.equal(run(runner, Chunk(prompt, 0, TABLE)), expected)


def test_garbage_beyond_the_context_is_never_read(runner_bf16: CpuRunner, prompt: list[int]) -> None:
    expected = run(runner_bf16, Chunk(prompt[:21], 0, [0, 1]))
    pool = runner_bf16.decoder.pool
    pool[70:72] = torch.nan
    assert torch.equal(run(runner_bf16, Chunk(prompt[:21], 0, [70, 71])), expected)


@pytest.mark.parametrize("name", ["torch_bf16", "torch_f32"])
def test_the_fallback_is_exact_too(request: pytest.FixtureRequest, name: str, prompt: list[int]) -> None:
    runner: CpuRunner = request.getfixturevalue(name)
    tokens = prompt[:37]
    whole = run(runner, Chunk(tokens, 0, TABLE))
    assert torch.equal(run_in_chunks(runner, tokens, (1, 2, 5, 13), [40, 9, 30]), whole)
    table = TABLE[:3]
    together = run(runner, Chunk(prompt[40:62], 0, [20, 21]), Chunk(tokens[36:], 36, table), last_only=True)
    assert torch.equal(together[1], whole[36])
