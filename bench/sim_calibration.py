"""`python -m bench.sim_calibration -o FILE`: a model of time of this machine's CPU worker, for simulated workers.

Runs steps of the real model (prefill chunks; decodes of several sequences at several context lengths), takes the median
of each kind and fits the four figures of `TimeModel` by least squares on relative errors, none below zero. `kvmesh
worker --engine sim --sim-calibration FILE` obeys them. Printed beside: how far the fit is from what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.determinism_engine import NUM_BLOCKS, exact_runner
from services.common.blocks import BLOCK_TOKENS
from services.common.time_model import TimeModel
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput

PREFILL_TOKENS = (64, 128, 256, 512)
SEQUENCES = (1, 2, 4, 8, 16)
CONTEXTS = (64, 256, 448)


@dataclass(frozen=True, slots=True)
class Measured:
    """Median seconds of one kind of step; context_tokens: of all decoding sequences together."""

    prefill_tokens: int
    decode_sequences: int
    context_tokens: int
    seconds: float


def fit(steps: Sequence[Measured]) -> TimeModel:
    """The model whose steps are nearest to the measured ones. Pure; needs prefill-only and decode-only steps."""
    prefills = [step for step in steps if not step.decode_sequences]
    decodes = [step for step in steps if not step.prefill_tokens]
    rate = statistics.median(step.prefill_tokens / step.seconds for step in prefills)
    seconds = np.array([step.seconds for step in decodes])
    terms = np.array([(1.0, step.decode_sequences, step.context_tokens) for step in decodes])
    # Each row divided by its time: errors are shares, and short steps count as much as long ones.
    best = min(_fits(terms / seconds[:, None]), key=lambda found: found[1])
    return TimeModel(rate, *(float(value) for value in best[0]))


def _fits(rows: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """Least squares to ones over every subset of the terms that leaves no coefficient below zero, with its residual."""
    found = []
    columns = range(rows.shape[1])
    for size in range(1, len(columns) + 1):
        for kept in itertools.combinations(columns, size):
            values, *_ = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)
            if (values >= 0).all():
                solution = np.zeros(len(columns))
                solution[list(kept)] = values
                found.append((solution, float(((rows @ solution - 1) ** 2).sum())))
    return found


def errors(model: TimeModel, steps: Sequence[Measured]) -> list[float]:
    """Of each step: how far the model is from it, as a share of it."""
    told = (model.step_s(step.prefill_tokens, step.decode_sequences, step.context_tokens) for step in steps)
    return [abs(seconds - step.seconds) / step.seconds for seconds, step in zip(told, steps, strict=True)]


def measure(runner: CpuRunner, repeats: int) -> list[Measured]:
    """Every kind of step `repeats` times, after one that does not count."""
    found = [Measured(count, 0, 0, _median_s(runner, [(0, count)], repeats)) for count in PREFILL_TOKENS]
    for sequences, context in itertools.product(SEQUENCES, CONTEXTS):
        if sequences * _blocks(context) <= NUM_BLOCKS:
            seconds = _median_s(runner, [(context - 1, 1)] * sequences, repeats)
            found.append(Measured(0, sequences, sequences * context, seconds))
    return found


def _median_s(runner: CpuRunner, chunks: Sequence[tuple[int, int]], repeats: int) -> float:
    """Of a step with these (start, length), each sequence in slots of its own."""
    return statistics.median([_step_s(runner, chunks) for _ in range(repeats + 1)][1:])


def _step_s(runner: CpuRunner, chunks: Sequence[tuple[int, int]]) -> float:
    lengths = [length for _, length in chunks]
    ends = [start + length for start, length in chunks]
    width = max(_blocks(end) for end in ends)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    step = StepInput(
        token_ids=(np.arange(starts[-1]) * 37 % runner.spec.vocab_size).astype(np.int32),
        positions=np.concatenate([np.arange(s, s + n) for s, n in chunks]).astype(np.int32),
        query_starts=starts,
        context_lens=np.array(ends, np.int32),
        block_tables=np.arange(len(chunks) * width, dtype=np.int32).reshape(len(chunks), width),
        logit_rows=starts[1:] - 1,
    )
    started_s = time.perf_counter()
    runner.submit(step)
    runner.collect()
    return time.perf_counter() - started_s


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file for sim_calibration")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each kind, of which the median counts")
    arguments = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    with exact_runner() as runner:
        steps = measure(runner, arguments.repeats)
    model = fit(steps)
    arguments.output.write_text(json.dumps(asdict(model), indent=1) + "\n")
    for name, value in asdict(model).items():
        print(f"{name:22} {value:.3g}")
    shares = errors(model, steps)
    print(f"error of the fit: median {statistics.median(shares):.0%}, largest {max(shares):.0%}, {len(steps)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
