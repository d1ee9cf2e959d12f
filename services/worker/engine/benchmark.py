"""The self-benchmark at start: a token through the model path, and the speeds that the first decisions go by."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from services.common.blocks import BLOCK_TOKENS
from services.worker.draws import DrawRow
from services.worker.messages import Sampling
from services.worker.model.step import Int32Array, Runner, StepInput
from services.worker.sampler import draw_tokens

_PREFILL_TOKENS = 256
_DECODE_STEPS = 5


@dataclass(frozen=True, slots=True)
class Benchmark:
    """prefill_tokens_per_s: of one chunk of a prompt. decode_step_s: of one sequence."""

    prefill_tokens_per_s: float
    decode_step_s: float


def measure(runner: Runner, *, num_blocks: int, max_context: int, vocab_size: int) -> Benchmark:
    """Run one warm-up and one measured prefill, then decode steps, in the first slots of a pool that is not in use.

    Raises RuntimeError when the model's output is not a number.
    """
    length = min(_PREFILL_TOKENS, (max_context - _DECODE_STEPS) // 2, (num_blocks * BLOCK_TOKENS - _DECODE_STEPS) // 2)
    length = max(1, length)
    prompt = (np.arange(length) * 37 % vocab_size).astype(np.int32)
    _run(runner, prompt, 0)
    prefill_s = _run(runner, prompt, 0)
    decodes = [_run(runner, prompt[:1], length + step) for step in range(_DECODE_STEPS)]
    return Benchmark(length / prefill_s, sorted(decodes)[_DECODE_STEPS // 2])


def _run(runner: Runner, tokens: Int32Array, start: int) -> float:
    """Seconds of one step of one sequence, its draw included."""
    started_s = time.perf_counter()
    end = start + len(tokens)
    runner.submit(
        StepInput(
            token_ids=tokens,
            positions=np.arange(start, end, dtype=np.int32),
            query_starts=np.array([0, len(tokens)], dtype=np.int32),
            context_lens=np.array([end], dtype=np.int32),
            block_tables=np.arange(-(-end // BLOCK_TOKENS), dtype=np.int32)[None],
            logit_rows=np.array([len(tokens) - 1], dtype=np.int32),
        )
    )
    empty = np.empty(0, dtype=np.int32)
    draws = draw_tokens(runner.collect(), [DrawRow(Sampling(temperature=0.0), 0, end, empty, empty)])
    if draws.tokens[0] is None:
        raise RuntimeError("the model's output is not a number")
    return max(time.perf_counter() - started_s, 1e-6)
