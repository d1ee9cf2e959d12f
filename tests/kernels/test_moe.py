"""The mixture of experts: the specification against a loop over tokens, and the compiled kernel against it."""

from __future__ import annotations

from ctypes import POINTER, cast

import pytest
import torch
import torch.nn.functional as F

from kernels.activation import Activation, gated
from kernels.cpu import library
from kernels.cpu.packing import PackedLinear, pack_linear
from kernels.cpu.structs import ExpertsStruct, LinearStruct, linear_struct
from kernels.linear import interleave_gate_up, linear
from kernels.moe import mixture, route


def make(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    experts, hidden, inner = 6, 32, 48
    return (
        torch.randn(tokens, hidden).to(dtype),
        torch.randn(tokens, experts) * 2,
        (torch.randn(experts, 2 * inner, hidden) / 4).to(dtype),
        (torch.randn(experts, hidden, inner) / 4).to(dtype),
    )


def by_token(x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, k: int) -> torch.Tensor:
    rows = []
    for token, row in zip(x, logits, strict=True):
        shares = torch.exp(row - row.max())
        best = sorted(range(len(row)), key=lambda e: (-float(row[e]), e))[:k]
        total = torch.zeros_like(token)
        for e in best:
            gate, up = (gate_up[e] @ token).chunk(2)
            total += shares[e] / sum(shares[best]) * (down[e] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_mixture_against_a_loop_over_tokens(k: int) -> None:
    arguments = make(9)
    torch.testing.assert_close(mixture(*arguments, k=k, renormalise=True), by_token(*arguments, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rows_of_a_mixture_are_independent(dtype: torch.dtype, activation: Activation) -> None:
    x, logits, gate_up, down = make(33, dtype)
    logits[:, 0] += 3  # one crowded expert
    options = {"k": 2, "renormalise": False, "activation": activation}
    expected = mixture(x, logits, gate_up, down, **options)
    for rows in (1, 2, 3, 5, 7, 16):
        assert torch.equal(mixture(x[-rows:], logits[-rows:], gate_up, down, **options), expected[-rows:])


def test_equal_shares_go_to_the_lower_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    experts, weights = route(logits, 3, renormalise=True)
    assert experts.tolist() == [[1, 3, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_shares_are_of_all_experts_unless_renormalised() -> None:
    experts, weights = route(torch.tensor([[0.0, 1.0, -1.0]]).to(torch.bfloat16), 2, renormalise=False)
    assert experts.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([0.0, 1.0, -1.0]), -1)[[1, 0]][None])


def test_gate_comes_first() -> None:
    found = gated(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "silu")
    torch.testing.assert_close(found, F.silu(torch.tensor([[1.0, 2.0]])) * torch.tensor([[3.0, 4.0]]))


def compiled(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    k: int,
    renormalise: bool,
    activation: Activation = "silu",
    threads: int = 1,
) -> torch.Tensor:
    """The compiled mixture, its router included."""
    packed_router = pack_linear(router)
    up = [pack_linear(interleave_gate_up(*one.chunk(2))) for one in gate_up]
    back = [pack_linear(one) for one in down]

    def array(layers: list[PackedLinear]) -> object:
        return cast((LinearStruct * len(layers))(*map(linear_struct, layers)), POINTER(LinearStruct))

    experts = ExpertsStruct(
        router=linear_struct(packed_router),
        gate_up=array(up),
        down=array(back),
        count=len(router),
        held=len(down),
        per_token=k,
        intermediate=down.shape[2],
        renormalise=renormalise,
    )
    out = torch.empty(len(x), down.shape[1])
    library.mixture(x, experts, activation, out, num_threads=threads)
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("k", "renormalise"), [(1, True), (2, False), (6, True)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_compiled(dtype: torch.dtype, tolerance: float, k: int, renormalise: bool, activation: Activation) -> None:
    x, _, gate_up, down = make(33, dtype)
    router = torch.randn(len(down), x.shape[1]).to(dtype)
    options = {"k": k, "renormalise": renormalise, "activation": activation}
    expected = mixture(x, linear(x, router), gate_up, down, **options)
    for threads in (1, 2):
        found = compiled(x, router, gate_up, down, **options, threads=threads)
        assert (found - expected).norm() < tolerance * expected.norm()


def test_compiled_ranks_by_logit_where_shares_are_equal() -> None:
    """The shares of these two logits round to the same number."""
    x, _, gate_up, down = make(1)
    router = torch.zeros(len(down), x.shape[1])
    x[0, 0], router[:, 0], router[4, 0] = 1.0, -1e-9, 1e-9
    logits = linear(x, router)
    assert route(logits, 1, renormalise=True)[0].tolist() == [[4]]
    expected = mixture(x, logits, gate_up, down, k=1, renormalise=True)
    torch.testing.assert_close(compiled(x, router, gate_up, down, k=1, renormalise=True), expected)
