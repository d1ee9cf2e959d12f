"""The mixture of experts in Triton against its specification: crowded and idle experts, ties, odd sizes, exact rows."""

from __future__ import annotations

import pytest
import torch

from kernels import moe as reference
from kernels.activation import Activation
from kernels.triton.moe import EXACT, TILES, choose, mixture, route


def make(tokens: int, dtype: torch.dtype = torch.float32, experts: int = 5) -> tuple[torch.Tensor, ...]:
    hidden, inner = 40, 24
    return (
        torch.randn(tokens, hidden).to(dtype),
        torch.randn(tokens, experts) * 2,
        (torch.randn(experts, 2 * inner, hidden) / 4).to(dtype),
        (torch.randn(experts, hidden, inner) / 4).to(dtype),
    )


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 3), (8, 8), (60, 4)])
def test_routing(experts: int, k: int, renormalise: bool) -> None:
    logits = torch.randn(6, experts) * 3
    chosen, weights = route(logits, k, renormalise)
    expected, expected_weights = reference.route(logits, k, renormalise)
    assert torch.equal(chosen.long(), expected)
    torch.testing.assert_close(weights, expected_weights)


def test_routing_of_ties_and_extreme_logits() -> None:
    low, high = -torch.inf, 1e38
    logits = torch.tensor(
        [[1, 2, 1, 2, 2], [0.0, -0.0, 0, -0.0, -1], [low, low, 1, low, low], [high, -high, 0, high, 1]]
    )
    for dtype in (torch.float32, torch.bfloat16):
        chosen, weights = route(logits.to(dtype), 3, renormalise=True)
        expected, expected_weights = reference.route(logits.to(dtype), 3, renormalise=True)
        assert chosen.tolist() == expected.tolist() == [[1, 3, 4], [0, 1, 2], [2, 0, 1], [0, 3, 4]]
        torch.testing.assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_routing_of_no_numbers_stays_within_the_experts() -> None:
    chosen, _ = route(torch.full((2, 5), torch.nan), 3, renormalise=True)
    assert ((chosen >= 0) & (chosen < 5)).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 21])
def test_mixture(tokens: int, activation: Activation, dtype: torch.dtype, exact: bool) -> None:
    arguments = make(tokens, dtype)
    options = {"k": 2, "renormalise": True, "activation": activation}
    expected = reference.mixture(*arguments, **options)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    found = mixture(*arguments, **options, exact=exact)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_all_tokens_to_one_expert_and_to_all() -> None:
    x, logits, gate_up, down = make(33)
    logits[:, 3] += 100
    for k in (1, 5):
        expected = reference.mixture(x, logits, gate_up, down, k=k, renormalise=False)
        found = mixture(x, logits, gate_up, down, k=k, renormalise=False, exact=False)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_are_independent_in_exact_mode() -> None:
    x, logits, gate_up, down = make(35, torch.bfloat16)
    logits[:, 0] += 3
    options = {"k": 2, "renormalise": True, "exact": True}
    whole = mixture(x, logits, gate_up, down, **options)
    for rows in (1, 18):
        assert torch.equal(mixture(x[-rows:], logits[-rows:], gate_up, down, **options), whole[-rows:])


def test_tiles_follow_the_rows_of_an_expert() -> None:
    assert choose(8, 128, exact=False) == choose(2048, 128, exact=False) == TILES[16]
    assert choose(2049, 128, exact=False) == TILES[64]
    assert choose(10**6, 128, exact=False) == TILES[128]
    assert choose(8, 128, exact=True) == choose(10**6, 128, exact=True) == EXACT


def test_no_tokens() -> None:
    assert mixture(*make(0), k=2, renormalise=True, exact=False).shape == (0, 40)
    with pytest.raises(ValueError, match="6 of 5"):
        route(torch.zeros(1, 5), 6, renormalise=True)
