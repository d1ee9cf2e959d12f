"""What this machine can do at most: bytes read and products summed a second, by the kernels' own inner loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from typing import Literal

import torch

from kernels.cpu.huge_pages import HugePages
from kernels.cpu.library import library
from kernels.linear import PANEL_COLUMNS

Products = Literal["float32", "bfloat16", "int8"]

# Number of the kernel's kind, and values in one unit of a row.
_KINDS: dict[Products, tuple[int, int]] = {"float32": (0, 1), "bfloat16": (1, 2), "int8": (2, 4)}
READ_BYTES = 256 * 2**20
ROUNDS = 20_000
TRIES = 9


def _best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def read_bytes_per_s(num_threads: int) -> float:
    """Best of some reads of memory far larger than the caches, in huge pages as weights are."""
    memory = HugePages().copy(torch.ones(READ_BYTES, dtype=torch.uint8))
    arguments = c_void_p(memory.data_ptr()), c_size_t(READ_BYTES), c_int(num_threads)
    return READ_BYTES / _best_seconds(lambda: library().kvm_read_once(*arguments))


def operations_per_s(products: Products, num_threads: int) -> float:
    """Best of some runs of the register-blocked product on operands in the first-level cache; product and sum: two."""
    kind, values = _KINDS[products]
    operations: float = 2.0 * library().kvm_probe_units() * PANEL_COLUMNS * values * ROUNDS * num_threads
    arguments = c_int(kind), c_int(ROUNDS), c_int(num_threads)
    return operations / _best_seconds(lambda: library().kvm_multiply_in_place(*arguments))
