"""Draws in Triton: the tokens of the specification and of the worker's own sampler, for the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import sampling as reference
from kernels.sampling import SamplingRows
from kernels.triton.sampling import TABLES, Tables, draw_tokens
from services.worker import sampler
from services.worker.draws import DrawRow
from services.worker.messages import Sampling

# Several chunks and steps of a small vocabulary; a row's tokens are gathered late, or never.
SMALL = Tables(chunk=64, block=64, capacity=16, chunk_warps=4, block_warps=4)
NONE = np.empty(0, np.int32)


def rows_of(samplings: list[Sampling], shares: list[float]) -> SamplingRows:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return SamplingRows(
        column([s.temperature for s in samplings], torch.float64),
        column([s.top_k for s in samplings], torch.int32),
        column([s.top_p for s in samplings], torch.float64),
        column([s.min_p for s in samplings], torch.float64),
        column(shares, torch.float64),
    )


def check(logits: torch.Tensor, samplings: list[Sampling], tables: Tables) -> None:
    """The kernel, the specification and the worker's sampler agree."""
    draws = [DrawRow(sampling, 3, 10 + i, NONE, NONE) for i, sampling in enumerate(samplings)]
    rows = rows_of(samplings, [sampler.uniform(draw.sampling.seed, draw.choice, draw.position) for draw in draws])
    expected = sampler.draw_tokens(logits, draws).tokens
    assert [None if token < 0 else token for token in reference.draw_tokens(logits, rows).tolist()] == expected
    assert [None if token < 0 else token for token in draw_tokens(logits, rows, tables).tolist()] == expected


@pytest.mark.parametrize("tables", [SMALL, TABLES])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.5, top_k=40),
        Sampling(temperature=1.0, top_k=1000),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.3, top_p=0.5),
        Sampling(temperature=4.0, top_p=0.999),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1.0, min_p=0.05),
        Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02),
    ],
    ids=str,
)
def test_draws(sampling: Sampling, tables: Tables) -> None:
    count = 4 if tables is SMALL else 1
    logits = torch.randn(count, 300) * torch.linspace(6, 0.5, count)[:, None]
    check(logits, [sampling] * count, tables)


def test_rows_of_all_kinds_stand_side_by_side_and_do_not_matter_to_each_other() -> None:
    logits = torch.randn(4, 257) * 3
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p) for t, k, p in ((0, 0, 1), (1, 3, 1), (1, 0, 0.4), (2, 9, 0.9))
    ]
    check(logits, samplings, SMALL)
    rows = rows_of(samplings, [0.2, 0.9, 0.5, 0.7])
    whole = draw_tokens(logits, rows, SMALL)
    for i in range(4):
        alone = rows_of(samplings[i : i + 1], [float(rows.share[i])])
        assert draw_tokens(logits[i : i + 1], alone, SMALL).tolist() == whole[i : i + 1].tolist()


def test_tied_tokens_stay_together() -> None:
    """Half of the row ties at the threshold of each rule; zeros of both signs are one."""
    logits = torch.zeros(2, 200)
    logits[:, ::2] = -0.0
    logits[:, 100:] = -3.0
    logits[1] += 5
    kinds = [
        Sampling(temperature=1.0, top_k=7),
        Sampling(temperature=1.0, top_p=0.2),
        Sampling(temperature=1.0, min_p=1.0),
    ]
    for kind in kinds:
        check(logits, [kind] * 2, SMALL)
        last = rows_of([kind], [1 - 2**-52])
        assert draw_tokens(logits[:1], last, SMALL).item() == 99


def test_equal_maxima_go_to_the_first() -> None:
    logits = torch.zeros(2, 150)
    logits[0, [70, 140]] = 4.0
    logits[1, [3, 149]] = 4.0
    check(logits, [Sampling(temperature=0.0)] * 2, SMALL)
    assert draw_tokens(logits, rows_of([Sampling(temperature=0.0)] * 2, [0.0] * 2), SMALL).tolist() == [70, 3]


def test_shares_at_both_ends() -> None:
    logits = torch.randn(1, 100).repeat(2, 1)
    rows = rows_of([Sampling(temperature=1.0)] * 2, [0.0, 1 - 2**-52])
    assert draw_tokens(logits, rows, SMALL).tolist() == [0, 99] == reference.draw_tokens(logits, rows).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extreme_logits() -> None:
    logits = torch.randn(7, 130)
    logits[0, 5] = torch.nan
    logits[1, 129] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, ::3] = -torch.inf
    logits[5] = logits[5] * 1e30
    logits[6] = logits[6] * 1e-6
    for kind in (Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=4), Sampling(temperature=1.0, top_p=0.7)):
        check(logits, [kind] * 7, SMALL)


def test_one_token_and_no_rows() -> None:
    check(torch.zeros(1, 1), [Sampling(temperature=1.0, top_k=1, top_p=0.5)], SMALL)
    assert draw_tokens(torch.zeros(0, 10), rows_of([], []), SMALL).shape == (0,)
    with pytest.raises(ValueError, match="float32"):
        draw_tokens(torch.zeros(1, 10, dtype=torch.bfloat16), rows_of([Sampling()], [0.0]), SMALL)
