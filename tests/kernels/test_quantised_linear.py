"""The packing of INT8 and INT4 weights, its rounding, and the specification of the product."""

from __future__ import annotations

import pytest
import torch

from kernels.quantised_linear import (
    Bits,
    QuantisedWeight,
    dequantise,
    pack_int4,
    quantise,
    quantised_linear,
    unpack_int4,
)


def test_order_of_a_pack() -> None:
    q = torch.arange(64).view(1, 64).remainder(16).sub(8).to(torch.int8)
    q[0, 32:] = -8
    q[0, 33], q[0, 49] = 3, -2
    packed = pack_int4(q)
    assert packed.shape == (1, 32)
    assert packed[0, :16].tolist() == [17 * j for j in range(16)]
    assert packed[0, 17] == (3 + 8) | (-2 + 8) << 4
    assert torch.equal(unpack_int4(packed), q)


@pytest.mark.parametrize(
    ("bits", "group", "asymmetric"),
    [(8, None, False), (8, 32, False), (4, 32, False), (4, 64, True), (4, 128, False), (4, None, True)],
)
def test_rounding_error_is_at_most_half_a_step(bits: Bits, group: int | None, asymmetric: bool) -> None:
    weight = torch.randn(5, 256) + 0.3
    weight[1] = 0.0
    weight[2, :128] = 1.5
    packed = quantise(weight, bits, group, asymmetric=asymmetric)
    assert (packed.bits, packed.shape, packed.group) == (bits, (5, 256), group or 256)
    error = (dequantise(packed) - weight).abs()
    step = packed.scales.abs().repeat_interleave(packed.group, 1)
    # INT4's symmetric range ends at 7: a value near the opposite of the largest is a whole step away.
    assert (error <= step * (1.0 if bits == 4 and not asymmetric else 0.5) + 1e-6).all()
    assert not error[1].any()


def test_zeros_shift_every_value_of_their_group() -> None:
    q = torch.zeros(2, 64, dtype=torch.int8)
    weight = QuantisedWeight(pack_int4(q), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 1], [2, 3]]))
    expected = torch.tensor([[-0.5, -2.0], [-6.0, -12.0]]).repeat_interleave(32, 1)
    assert torch.equal(dequantise(weight), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_product_and_independence_of_rows(bits: Bits) -> None:
    weight = quantise(torch.randn(48, 64), bits, 32, asymmetric=bits == 4)
    x, bias = torch.randn(21, 64).to(torch.bfloat16), torch.randn(48)
    expected = quantised_linear(x, weight, bias)
    exact = x.double() @ dequantise(weight).double().T + bias
    torch.testing.assert_close(expected.double(), exact, atol=1e-4, rtol=1e-5)
    for rows in (1, 2, 3, 5, 7):
        assert torch.equal(quantised_linear(x[-rows:], weight, bias), expected[-rows:])


def test_refuses_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="group 48 for k 64"):
        quantise(torch.randn(2, 64), 8, 48)
    with pytest.raises(ValueError, match="group 16 for k 64"):
        quantise(torch.randn(2, 64), 4, 16)
    with pytest.raises(ValueError, match="symmetric"):
        quantise(torch.randn(2, 64), 8, asymmetric=True)
