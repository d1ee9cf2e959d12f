"""`python -m bench.parallel`: a replica of several ranks against `transformers`, and against one process.

Models with random weights (bench/family_models.py): a dense one for tensor and pipeline parallel, a mixture of experts
for expert parallel. Measured are the largest difference of logits from transformers in float32, in a prefill in one
step and in a decode token by token; each rank's bytes of parameters against its share; and how many decode steps and
prefills a second the group does for each of one process with as many threads, the two in turn. Ranks are processes, as
in a worker, over gloo on the loopback interface, with one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.families import Reference, largest, open_pool, reference_of
from bench.family_models import make_model, save_model
from bench.rank_group import open_group
from services.common.telemetry import configure_logging
from services.worker.model.layout import KV_DTYPE_BYTES, ComputeDtype
from services.worker.model.model_files import open_model
from services.worker.model.rank_loading import load_part
from services.worker.model.reading import read_weights
from services.worker.model.shard import Parallelism, Shard, share_bytes
from services.worker.model.step import Runner, StepInput
from services.worker.model.weights import weight_bytes

RESULT_FILE = Path(__file__).parent / "results" / "parallel.json"
NUM_BLOCKS, CONTEXT, DECODED, SEQUENCES = 40, 256, 24, 4
TABLE = list(range(13))
# Large enough that a step is not all messages: 29 and 22 million parameters.
_SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any], list[Parallelism]]] = {
    "dense": ("llama3", {**_SHAPE, "intermediate_size": 1536}, [Parallelism(2), Parallelism(1, 2)]),
    "experts": (
        "mixtral",
        {**_SHAPE, "intermediate_size": 512, "num_local_experts": 4, "num_hidden_layers": 4},
        [Parallelism(1, 1, 2)],
    ),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. *_bytes: of each rank. *_ratio: rate of the group to that of one process."""

    model: str
    ranks: str
    dtype: str
    backend: str
    prefill: float
    decode: float
    reference_bf16: float
    largest_logit: float
    rank_bytes: list[int]
    share_bytes: list[int]
    replicated_bytes: list[int]
    decode_ratio: float
    prefill_ratio: float


def step_of(tokens: Sequence[Sequence[int]], start: int, tables: Sequence[Sequence[int]]) -> StepInput:
    """As many tokens of each sequence at `start`; all their logits."""
    count, sequences = len(tokens[0]), len(tokens)
    return StepInput(
        token_ids=np.concatenate(tokens).astype(np.int32),
        positions=np.tile(np.arange(start, start + count, dtype=np.int32), sequences),
        query_starts=np.arange(0, count * sequences + 1, count, dtype=np.int32),
        context_lens=np.full(sequences, start + count, np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.arange(count * sequences, dtype=np.int32),
    )


def run(runner: Runner, step: StepInput) -> torch.Tensor:
    """A step's logits."""
    runner.submit(step)
    return runner.collect()


def differences(runner: Runner, reference: Reference) -> tuple[float, float]:
    """The largest of a prefill in one step, and of a decode behind it."""
    tokens, expected = reference.tokens, reference.logits
    prefill = run(runner, step_of([tokens], 0, [TABLE]))
    first = len(tokens) - DECODED
    decoded = [run(runner, step_of([[tokens[at]]], at, [TABLE])) for at in range(first, len(tokens))]
    return largest(prefill, expected), largest(torch.cat(decoded), expected[first:])


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def ratio(group: Runner, one: Runner, step: StepInput, rounds: int) -> float:
    """How many steps the group does while the other does one: medians of runs in turn."""
    pairs = [(seconds(lambda: run(group, step)), seconds(lambda: run(one, step))) for _ in range(rounds)]
    return statistics.median(alone for _, alone in pairs) / statistics.median(together for together, _ in pairs)


def rank_figures(path: Path, parallelism: Parallelism, dtype: ComputeDtype) -> list[tuple[int, int, int]]:
    """Of each rank: bytes of parameters that it has, its share of what divides, what is replicated."""
    model, figures = open_model(path), []
    for rank in range(parallelism.num_ranks):
        shard = Shard(model.config, parallelism, rank)
        part = model.part(shard)
        # Raises AssertionError where a rank has more than it should.
        weights = load_part(part.view(read_weights(part.files).tensors), shard, dtype)
        share = share_bytes(shard, KV_DTYPE_BYTES[dtype])
        figures.append((weight_bytes(weights), share.divided, share.replicated))
    return figures


def measure(
    name: str, path: Path, parallelism: Parallelism, dtype: ComputeDtype, reference: Reference, rounds: int
) -> Row:
    """One row."""
    with ExitStack() as stack:
        torch.set_num_threads(parallelism.num_ranks)
        one = stack.enter_context(open_pool(path, dtype, compiled=True)).runner
        group: Runner = one
        backend = one.spec.backend
        if parallelism.num_ranks > 1:
            opened = stack.enter_context(
                open_group(path, parallelism, dtype=dtype, num_blocks=NUM_BLOCKS, context=CONTEXT)
            )
            group, backend = opened, opened.spec.backend
        prefill, decode = differences(group, reference)
        tables = [TABLE[3 * number : 3 * number + 3] for number in range(SEQUENCES)]
        step = step_of([reference.tokens[:1]] * SEQUENCES, 40, tables)
        whole = step_of([reference.tokens], 0, [TABLE])
        figures = rank_figures(path, parallelism, dtype)
        return Row(
            model=name,
            ranks=f"TP {parallelism.tensor}, PP {parallelism.pipeline}, EP {parallelism.expert}",
            dtype=dtype,
            backend=backend,
            prefill=prefill,
            decode=decode,
            reference_bf16=reference.bf16_difference,
            largest_logit=reference.logits.abs().max().item(),
            rank_bytes=[held for held, _, _ in figures],
            share_bytes=[divided for _, divided, _ in figures],
            replicated_bytes=[replicated for _, _, replicated in figures],
            decode_ratio=ratio(group, one, step, rounds),
            prefill_ratio=ratio(group, one, whole, max(1, rounds // 4)),
        )


def line(row: Row) -> str:
    """A row as the table shows it."""
    own = f"{row.reference_bf16:9.2f}" if row.dtype == "bfloat16" else f"{'':9}"
    held = " ".join(
        f"{held / 1e6:.1f}/{share / 1e6:.1f}" for held, share in zip(row.rank_bytes, _shares(row), strict=True)
    )
    differences = f"{row.prefill:10.2e}{row.decode:10.2e}{own}{row.largest_logit:8.1f}"
    numbers = f"{differences}{row.decode_ratio:8.2f}{row.prefill_ratio:9.2f}"
    return f"{row.model:9}{row.ranks:19}{row.dtype:9}{row.backend:24}{numbers}  {held}"


def _shares(row: Row) -> list[int]:
    return [share + replicated for share, replicated in zip(row.share_bytes, row.replicated_bytes, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="decode steps; a fourth as many prefills")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    arguments = parser.parse_args(argv)
    configure_logging("bench", "parallel", "ERROR")
    torch.set_grad_enabled(False)
    heads = f"{'prefill':>10}{'decode':>10}{'its own':>9}{'logit':>8}{'steps':>8}{'prefills':>9}"
    print(
        f"{'model':9}{'ranks':19}{'dtype':9}{'backend':24}{heads}  MB of each rank / its share and what is replicated"
    )
    rows = []
    for name, (family, changes, groups) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model: Any = make_model(family, **changes)
            path = save_model(model, Path(folder))
            reference = reference_of(model, model.config.vocab_size)
            for parallelism in (Parallelism(), *groups):
                for dtype in ("float32", "bfloat16"):
                    rows.append(measure(name, path, parallelism, dtype, reference, arguments.rounds))
                    print(line(rows[-1]), flush=True)
    write_result(arguments.output, rows, arguments.rounds)


def write_result(path: Path, rows: Sequence[Row], rounds: int) -> None:
    """The rows and what they were measured with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "command": f"python -m bench.parallel --rounds {rounds}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "reference": "transformers, float32, eager attention",
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
