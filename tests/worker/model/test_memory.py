"""The memory map and the arithmetic that sizes a pool."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.model.layout import KvLayout
from services.worker.model.memory import MemoryMap, pool_blocks
from services.worker.model.runner import CpuRunner
from services.worker.model.weights import weight_bytes

LAYOUT = KvLayout(num_kv_heads=2, num_layers=3, head_dim=16, dtype="bfloat16")


@given(free=st.integers(0, 2**40), reserve=st.integers(0, 2**40), fraction=st.floats(0.01, 1.0))
def test_a_pool_stays_within_its_share(free: int, reserve: int, fraction: float) -> None:
    blocks = pool_blocks(LAYOUT, free_bytes=free, reserve_bytes=reserve, fraction=fraction)
    share = max(0, free - reserve) * fraction
    assert blocks * LAYOUT.block_bytes <= share + 1
    assert (blocks + 1) * LAYOUT.block_bytes > share - 1


def test_the_largest_context_is_what_model_and_pool_hold() -> None:
    def with_blocks(count: int) -> MemoryMap:
        return MemoryMap("cpu", 10**9, 10**6, 10**5, 1000, count, 2048)

    assert with_blocks(10).largest_context == 160
    assert with_blocks(1000).largest_context == 2048
    assert with_blocks(1000).unused_bytes == 10**9 - 10**6 - 10**5 - 10**6


def test_a_tensor_that_is_there_twice_counts_once() -> None:
    tensor = torch.zeros(10)
    assert weight_bytes((tensor, (tensor.view(2, 5), None), torch.zeros(3, dtype=torch.bfloat16))) == 46


def test_a_cpu_runner_tells_its_map(runner_bf16: CpuRunner) -> None:
    memory = runner_bf16.spec.memory
    assert memory.device == "cpu"
    assert memory.kv_bytes == runner_bf16.decoder.pool.nbytes
    # 134.5 million parameters in BF16, the tied embedding (49152 x 576) once more as panels of the head.
    assert 325e6 < memory.weight_bytes < 327e6
    assert 0 < memory.reserve_bytes < memory.total_bytes
    assert memory.largest_context == 2048
