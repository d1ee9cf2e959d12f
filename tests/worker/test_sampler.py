"""The sampler against a plain reference, its independence of batch mates, and its distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.draws import DrawRow
from services.worker.messages import Sampling
from services.worker.sampler import MIN_LOGPROB, draw_tokens, uniform

EMPTY = np.array([], dtype=np.int32)


def row(
    sampling: Sampling, position: int = 0, prompt: list[int] | None = None, output: list[int] | None = None
) -> DrawRow:
    return DrawRow(
        sampling, 0, position, np.array(prompt or [], dtype=np.int32), np.array(output or [], dtype=np.int32)
    )


def reference(logits: torch.Tensor, draw: DrawRow) -> int:
    """One token by the definition, in plain Python and double precision."""
    s = draw.sampling
    values = [float(v) for v in logits.double()]
    for token in set(draw.prompt.tolist()) | set(draw.output.tolist()):
        values[token] = (
            values[token] / s.repetition_penalty if values[token] > 0 else values[token] * s.repetition_penalty
        )
    for token in draw.output.tolist():
        values[token] -= s.frequency_penalty
    for token in set(draw.output.tolist()):
        values[token] -= s.presence_penalty
    for token, bias in s.logit_bias.items():
        values[token] += bias
    if s.temperature == 0:
        return max(range(len(values)), key=lambda i: (values[i], -i))
    values = [v / s.temperature for v in values]
    kept = sorted(range(len(values)), key=lambda i: -values[i])[: s.top_k or len(values)]
    weights = {i: math.exp(values[i] - values[kept[0]]) for i in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        nucleus.append(i)
        reached += weights[i]
        if reached >= s.top_p * total:
            break
    nucleus = [i for i in nucleus if weights[i] >= s.min_p]
    target = uniform(s.seed, draw.choice, draw.position) * sum(weights[i] for i in nucleus)
    for i in sorted(nucleus):
        target -= weights[i]
        if target < 0:
            return i
    return max(nucleus)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.37, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 300, 100_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, 599), st.floats(-5, 5, width=32), max_size=3),
    num_logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=60)
@given(st.lists(samplings, min_size=1, max_size=6), st.integers(0, 2**31), st.sampled_from([0.3, 3.0]))
def test_equals_the_reference_and_ignores_batch_mates(chosen: list[Sampling], seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(chosen), 600, generator=generator) * spread
    before = logits.clone()
    rows = [row(s, position=i, prompt=[1, 2, 3], output=[2, 5, 5]) for i, s in enumerate(chosen)]
    together = draw_tokens(logits, rows)
    assert torch.equal(logits, before)
    for i, draw in enumerate(rows):
        assert together.tokens[i] == reference(logits[i], draw)
        alone = draw_tokens(logits[i : i + 1].clone(), [draw])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_p=0.8),
        Sampling(top_p=0.999, temperature=2.0),
        Sampling(top_k=20_000),
        Sampling(top_k=3000, top_p=0.9),
        Sampling(top_p=1e-6),
        Sampling(top_k=40, temperature=0.2),
        Sampling(min_p=0.2, top_p=0.99),
    ],
)
def test_large_vocabulary_rows_do_not_depend_on_their_number(sampling: Sampling) -> None:
    logits = torch.randn(9, 49_152, generator=torch.Generator().manual_seed(3))
    rows = [row(sampling, position=i) for i in range(9)]
    together = draw_tokens(logits, rows)
    assert [draw_tokens(logits[i : i + 1], rows[i : i + 1]).tokens[0] for i in range(9)] == together.tokens
    assert together.tokens[4] == reference(logits[4], rows[4])


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.97), Sampling(top_k=700), Sampling(top_k=500, top_p=0.6)])
def test_flat_distributions_equal_the_reference(sampling: Sampling) -> None:
    logits = torch.randn(20, 2000, generator=torch.Generator().manual_seed(5))
    rows = [row(sampling, position=i) for i in range(20)]
    assert draw_tokens(logits, rows).tokens == [reference(logits[i], rows[i]) for i in range(20)]


def test_equal_logits_all_stay() -> None:
    rows = [row(Sampling(top_p=0.5), position=i) for i in range(50)]
    assert len(set(draw_tokens(torch.zeros(50, 1000), rows).tokens)) > 40


@pytest.mark.parametrize("top_p", [1e-17, 0.0])
def test_a_nucleus_too_small_to_be_told_from_none_holds_the_highest(top_p: float) -> None:
    logits = torch.tensor([[0.5, 3.0, 1.0]])
    for sampling in (Sampling(top_p=top_p), Sampling(top_p=top_p, top_k=1)):
        assert draw_tokens(logits, [row(sampling)]).tokens == [1]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [row(Sampling(seed=7), position=i) for i in range(4000)]
    tokens = draw_tokens(probabilities.log().repeat(4000, 1), rows).tokens
    counts = np.bincount([token for token in tokens if token is not None], minlength=4) / 4000
    assert np.abs(counts - probabilities.numpy()).max() < 0.03


def test_uniform_depends_on_each_part_alone() -> None:
    draws = {uniform(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(40)}
    assert len(draws) == 1000
    assert all(0 <= u < 1 for u in draws)
    assert uniform(1, 2, 3) == uniform(1, 2, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_grammar_allows_is_drawn(temperature: float) -> None:
    allowed = np.zeros(50, dtype=np.bool_)
    allowed[[7, 30, 31]] = True
    sampling = Sampling(temperature=temperature, seed=5, logit_bias={8: 100.0}, num_logprobs=5, presence_penalty=1.0)
    rows = [replace(row(sampling, position, output=[30]), allowed=allowed) for position in range(40)]
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).repeat(40, 1)
    before = logits.clone()
    draws = draw_tokens(logits, rows)
    drawn = {token for token in draws.tokens if token is not None}
    assert torch.equal(logits, before)
    assert drawn <= {7, 30, 31}
    assert len(drawn) == (1 if temperature == 0 else 3)
    for token, logprob in zip(draws.tokens, draws.logprobs, strict=True):
        assert token is not None
        assert logprob is not None
        # Of the model's distribution over what is allowed, which alone is listed.
        assert {other for other, _ in logprob.top} == {7, 30, 31}
        assert sum(math.exp(value) for _, value in logprob.top) == pytest.approx(1.0)
        assert dict(logprob.top)[token] == pytest.approx(logprob.logprob)


def test_a_row_without_a_grammar_draws_as_if_it_were_alone() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    free, held = row(Sampling(seed=5)), replace(row(Sampling(seed=5)), allowed=np.arange(50) == 9)
    assert draw_tokens(logits, [free, held]).tokens == [draw_tokens(logits[:1], [free]).tokens[0], 9]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, -math.inf, 0.0]])
    sampling = Sampling(temperature=0.0, logit_bias={3: 50.0}, num_logprobs=4)
    draws = draw_tokens(logits, [row(sampling)])
    assert draws.tokens == [3]
    expected = torch.log_softmax(logits[0], 0)
    logprobs = draws.logprobs[0]
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in logprobs.top] == [0, 1, 3, 2]
    assert logprobs.top[-1][1] == MIN_LOGPROB


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_p=0.5)])
def test_logits_that_are_not_numbers_give_no_token(sampling: Sampling) -> None:
    logits = torch.zeros(2, 900)
    logits[1, 20] = math.nan
    tokens = draw_tokens(logits, [row(sampling), row(sampling)]).tokens
    assert tokens[0] is not None
    assert tokens[1] is None
