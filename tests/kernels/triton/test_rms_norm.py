"""The norm's kernel against its specification: with and without residual, odd widths, each row for itself."""

from __future__ import annotations

import pytest
import torch

from kernels import rms_norm as reference
from kernels.triton.rms_norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 576), (2, 2049)])
def test_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape) * 5, torch.randn(shape[1])
    expected = reference.rms_norm(x, weight, eps=1e-5, dtype=dtype)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5, dtype=dtype), expected, **tolerance(dtype))


def test_norm_of_a_part_of_wider_rows_into_a_given_tensor() -> None:
    wide, weight, out = torch.randn(3, 50), torch.randn(20), torch.empty(3, 20)
    assert rms_norm(wide[:, 7:27], weight, eps=1e-6, dtype=out.dtype, out=out) is out
    torch.testing.assert_close(out, reference.rms_norm(wide[:, 7:27], weight, eps=1e-6, dtype=out.dtype))


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_in_place(stream: torch.dtype, dtype: torch.dtype, post: bool) -> None:
    x, weight = torch.randn(5, 72).to(dtype), torch.randn(72)
    post_weight = torch.randn(72) if post else None
    residual = (torch.randn(5, 72) * 10).to(stream)
    options = {"eps": 1e-6, "dtype": dtype, "post_weight": post_weight}
    normed, total = reference.add_rms_norm(x, residual, weight, **options)
    found = add_rms_norm(x, residual, weight, **options)
    torch.testing.assert_close(residual, total, **tolerance(stream))
    torch.testing.assert_close(found, normed, **tolerance(dtype if stream == torch.float32 else stream))


def test_rows_are_independent() -> None:
    x, weight, residual = torch.randn(9, 100), torch.randn(100), torch.randn(9, 100)
    streams = [residual.clone(), residual[-2:].clone()]
    whole = add_rms_norm(x, streams[0], weight, eps=1e-6, dtype=torch.float32)
    part = add_rms_norm(x[-2:], streams[1], weight, eps=1e-6, dtype=torch.float32)
    assert torch.equal(part, whole[-2:])
    assert torch.equal(streams[1], streams[0][-2:])


def test_no_rows_and_rows_too_wide() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), eps=1e-6, dtype=torch.float32).shape == (0, 8)
    with pytest.raises(ValueError, match="40000"):
        rms_norm(torch.zeros(1, 40000), torch.ones(40000), eps=1e-6, dtype=torch.float32)
