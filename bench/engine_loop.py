"""`python -m bench.engine_loop`: what an engine does between two steps of its model, and what drawing takes.

The engine's own loop over the real model and real sockets, in one process; decode steps of 1, 4 and 16 sequences.
"between" is a turn of the loop less the time the model computed in it: what its cores wait for. Drawing: CPU time of
one step of 16 rows, of the model's logits after an ordinary text, on one thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table

from bench.determinism_engine import Served, exact_runner
from kernels.batch import PagedBatch
from services.common.models import DEFAULT_MODEL, resolve_model
from services.gateway.text.text_model import load_text_model
from services.worker.draws import DrawRow
from services.worker.engine.loop import EngineLoop
from services.worker.engine.sampled import Sampled
from services.worker.engine_messages import FromFrontToEngine
from services.worker.ipc import Link
from services.worker.messages import Sampling
from services.worker.model.decoder import Decoder
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput
from services.worker.mover_messages import FromMoverToEngine
from services.worker.sampler import draw_tokens

_ROWS = (1, 4, 16)
_TEXT = "The history of the city goes back to Roman times, when it was a trading post on the river. In the middle ages"
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 0.2, top_p 0.9": Sampling(temperature=0.2, top_p=0.9),
    "temperature 1": Sampling(),
    "top_p 0.9": Sampling(top_p=0.9),
    "top_k 50": Sampling(top_k=50),
    "temperature 0.8, top_k 50, top_p 0.9": Sampling(temperature=0.8, top_k=50, top_p=0.9),
    "greedy, penalties": Sampling(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
    "greedy, 5 logprobs": Sampling(temperature=0.0, num_logprobs=5),
}


class Timed:
    """A Decoder that notes how long each pass took."""

    def __init__(self, decoder: Decoder) -> None:
        self.seconds: list[float] = []
        self.pool, self.backend, self.adapters = decoder.pool, decoder.backend, decoder.adapters
        self._decoder = decoder

    def forward(self, batch: PagedBatch, num_threads: int) -> torch.Tensor:
        """See Decoder."""
        started_s = time.perf_counter()
        logits = self._decoder.forward(batch, num_threads)
        self.seconds.append(time.perf_counter() - started_s)
        return logits

    def hidden(self) -> torch.Tensor:
        """See Decoder."""
        return self._decoder.hidden()


@contextmanager
def _read_by_another() -> Iterator[socket.socket]:
    """A socket whose other end is read by another process."""
    ours, others = socket.socketpair()
    reader = subprocess.Popen(["cat"], stdin=others.fileno(), stdout=subprocess.DEVNULL)
    others.close()
    try:
        yield ours
    finally:
        ours.close()
        reader.wait(10)


def between_steps(runner: CpuRunner, rows: int, steps: int, threads: int) -> tuple[float, float, float]:
    """Median milliseconds of a turn, of the model in it, and of the rest."""
    timed = Timed(runner.decoder)
    served = Served(runner, output=steps + 8)
    with _read_by_another() as front, _read_by_another() as mover, CpuRunner(runner.spec, timed, threads) as own:
        loop = EngineLoop(served.core, Sampled(own), Link(front, FromFrontToEngine), Link(mover, FromMoverToEngine))
        served.submit_all(range(rows), Sampling(temperature=0.0))
        while served.core.scheduler.queued_prefill_tokens:
            loop.turn()
        loop.turn()
        timed.seconds.clear()
        turns = [_seconds_of_turn(loop) for _ in range(steps)]
    rest = [turn - compute for turn, compute in zip(turns, timed.seconds, strict=True)]
    return _median_ms(turns), _median_ms(timed.seconds), _median_ms(rest)


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _seconds_of_turn(loop: EngineLoop) -> float:
    started_s = time.perf_counter()
    loop.turn()
    return time.perf_counter() - started_s


def real_logits(runner: CpuRunner) -> torch.Tensor:
    """The logits of 16 tokens of a text."""
    tokens = load_text_model(resolve_model(DEFAULT_MODEL)).encode_text(_TEXT)[:16]
    count = len(tokens)
    every = np.arange(count, dtype=np.int32)
    starts, ends = np.array([0, count], np.int32), np.array([count], np.int32)
    table = np.zeros((1, 1), np.int32)
    runner.submit(StepInput(np.array(tokens, np.int32), every, starts, ends, table, every))
    return runner.collect()


def draw_ms(logits: torch.Tensor, sampling: Sampling, repeats: int) -> float:
    """Least CPU milliseconds of drawing one token for every row."""
    seen = np.arange(300, dtype=np.int32)
    rows = [DrawRow(sampling, 0, position, seen, seen[:50]) for position in range(len(logits))]
    times = []
    for _ in range(repeats):
        started_s = time.thread_time()
        draw_tokens(logits, rows)
        times.append(time.thread_time() - started_s)
    return 1e3 * min(times)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="decode steps of which medians are taken")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    steps, draws = Table("sequences", "step ms", "model ms", "between ms"), Table("sampling", "ms for 16 rows")
    with exact_runner() as runner:
        for rows in _ROWS:
            found = between_steps(runner, rows, arguments.steps, arguments.threads)
            steps.add_row(str(rows), *(f"{value:.2f}" for value in found))
        logits = real_logits(runner)
        for name, sampling in SAMPLINGS.items():
            draws.add_row(name, f"{draw_ms(logits, sampling, 30):.2f}")
    console = Console(width=100)
    console.print(steps)
    console.print(draws)
    return 0


if __name__ == "__main__":
    sys.exit(main())
