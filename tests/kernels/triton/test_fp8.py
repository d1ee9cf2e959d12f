"""e4m3 without the type: every byte, every tie, and the bounds, against torch's own conversion."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import from_e4m3, to_e4m3
from kernels.triton.launch import has_fp8

from .device import DEVICE

BYTES = torch.arange(256).to(torch.uint8)
NUMBERS = BYTES[(BYTES & 0x7F) != 0x7F]


@triton.jit
def decode(source: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, NATIVE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, from_e4m3(tl.load(source + at), NATIVE).to(tl.float32))


@triton.jit
def encode(source: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, to_e4m3(tl.load(source + at)))


def encoded(values: torch.Tensor) -> torch.Tensor:
    size = triton.next_power_of_2(len(values))
    source = torch.zeros(size)
    source[: len(values)] = values
    out = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    encode[(1,)](source.to(DEVICE), out, SIZE=size)
    return out.cpu()[: len(values)]


@pytest.mark.parametrize("native", [False, True])
def test_every_byte_that_is_a_number(native: bool) -> None:
    if native and DEVICE == "cuda" and not has_fp8(torch.device(DEVICE)):
        pytest.skip("the device has no FP8")
    out = torch.empty(256, device=DEVICE)
    decode[(1,)](BYTES.to(DEVICE), out, SIZE=256, NATIVE=native)
    expected = BYTES.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert torch.equal(out.cpu()[finite], expected[finite])


def test_every_number_is_its_own_byte() -> None:
    assert torch.equal(encoded(NUMBERS.view(torch.float8_e4m3fn).float()), NUMBERS)


def test_rounding_is_torchs_on_ties_and_beside_them() -> None:
    numbers = NUMBERS.view(torch.float8_e4m3fn).float().sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat((ties, ties * (1 + 2e-7), ties * (1 - 2e-7), torch.randn(1000) * 30, torch.randn(1000) * 0.01))
    assert torch.equal(encoded(around), around.to(torch.float8_e4m3fn).view(torch.uint8))


def test_what_is_too_large_becomes_the_largest() -> None:
    assert encoded(torch.tensor([449.0, 1e30, -1e30, torch.inf])).tolist() == [0x7E, 0x7E, 0xFE, 0x7E]
