"""The threads of the compiled kernels: same result whatever their number, with several callers, and after a fork."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.cpu import library

_EPS = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    library.library()


def _normed(x: torch.Tensor, weight: torch.Tensor, num_threads: int) -> torch.Tensor:
    out = torch.empty_like(x, dtype=torch.bfloat16)
    library.rms_norm(x, weight, _EPS, out, num_threads=num_threads)
    return out


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 500])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16, 200])
def test_the_number_of_threads_changes_nothing(rows: int, num_threads: int) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(64)
    assert torch.equal(_normed(x, weight, num_threads), _normed(x, weight, 1))


def test_callers_at_the_same_time_get_their_own_results() -> None:
    # Far more regions than cores, some with helpers and some without: a task run twice, or one missed, shows.
    inputs = [(torch.randn(300 + 7 * i, 128), torch.randn(128)) for i in range(6)]
    expected = [_normed(x, weight, 1) for x, weight in inputs]

    def repeat(index: int) -> bool:
        x, weight = inputs[index]
        return all(torch.equal(_normed(x, weight, 2 + index), expected[index]) for _ in range(300))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(repeat, range(len(inputs))))


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    x, weight = torch.randn(200, 64), torch.randn(64)
    expected = _normed(x, weight, 2)
    out = torch.empty_like(expected)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that waits for the parent's threads ends by it
        try:
            library.rms_norm(x, weight, _EPS, out, num_threads=2)
            os._exit(
                0 if out.view(torch.int16).numpy().tobytes() == expected.view(torch.int16).numpy().tobytes() else 1
            )
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
