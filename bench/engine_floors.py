"""What this machine allows at best: memory read bandwidth and BF16 matrix products, measured, and what follows.

A decode step reads all weights once, and every token takes two operations for each weight; nothing else is counted (no
attention, no sampling, no server), so that nothing can be faster than these floors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from bench.load import Workload
from services.worker.model.config import ModelConfig

_READ_BYTES = 256 * 2**20
# Rows, depth and columns of products: a prefill's in a small model, and large ones. Short ones meet a quiet moment.
_PRODUCTS = ((256, 576, 3072), (1024, 1024, 1024), (2048, 2048, 2048))
_REPEATS, _TRIES_S = 5, 0.7
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Peaks:
    """Best of some runs with all cores."""

    read_bytes_per_s: float
    matmul_flop_per_s: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one workload at one concurrency."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def measure_peaks() -> Peaks:
    """Takes a few seconds."""
    memory = torch.ones(_READ_BYTES // 4)
    read_s = _fastest(memory.max)
    return Peaks(_READ_BYTES / read_s, max(_flop_per_s(*shape) for shape in _PRODUCTS))


def floor(config: ModelConfig, workload: Workload, concurrency: int, peaks: Peaks) -> Floor:
    """TTFT and TPOT of one request alone; tokens/s with decode steps of `concurrency` rows. BF16 weights.

    A prompt is computed but for its shared tokens; the vocabulary head only where a token is drawn.
    """
    layers, head = _layer_weights(config), config.vocab_size * config.hidden_size
    prefill_s = 2 * (layers * workload.unique_tokens + head) / peaks.matmul_flop_per_s
    read_s = (layers + head) * _BF16_BYTES / peaks.read_bytes_per_s
    row_s = 2 * (layers + head) / peaks.matmul_flop_per_s
    step_s = max(read_s, concurrency * row_s)
    request_s = prefill_s + (workload.output_tokens - 1) * step_s / concurrency
    return Floor(max(prefill_s, read_s) * 1e3, max(read_s, row_s) * 1e3, workload.output_tokens / request_s)


def _flop_per_s(rows: int, depth: int, columns: int) -> float:
    x, y = torch.ones(rows, depth, dtype=torch.bfloat16), torch.ones(depth, columns, dtype=torch.bfloat16)
    return 2 * rows * depth * columns / _fastest(lambda: x @ y)


def _layer_weights(config: ModelConfig) -> int:
    """Weights of all layers' matrices."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.num_layers * config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest call after one that is not counted."""
    run()
    times: list[float] = []
    end_s = time.perf_counter() + _TRIES_S
    while len(times) < _REPEATS or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)
