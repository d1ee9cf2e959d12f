"""`python -m bench.speculation`: how much faster answers come with drafted tokens, and that they are the same.

The engine's scheduler over the default model in one process, plain and drafting in turn, the same chats at each: spans
that are copied (prose, code, JSON), and stories and explanations, which copy nothing. Timed is decoding alone, from the
step that ends the last prompt. Each pair of runs gives a speed-up, the first of a pair taking turns; the table has the
median. Run it on an idle machine; `--write` adds the rows to bench/results/speculation.json, in place of older ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table

from bench.determinism_engine import CONTEXT, NUM_BLOCKS, exact_runner
from bench.speculation_texts import WORKLOADS
from services.common.models import DEFAULT_MODEL, resolve_model
from services.gateway.text.text_model import TextModel, load_text_model
from services.worker.admission import SchedulerLimits
from services.worker.core import CoreLimits, EngineCore
from services.worker.engine.batch import StepBuilder
from services.worker.link_rates import LinkRates
from services.worker.messages import Sampling, StepOutput, Submit
from services.worker.model.runner import CpuRunner
from services.worker.rates import Rates
from services.worker.sampler import draw_tokens

_RESULTS = Path(__file__).parent / "results" / "speculation.json"
_STREAMS = (1, 2, 4, 8, 16)
_SAMPLINGS = {"greedy": Sampling(temperature=0.0), "seeded, temperature 1": Sampling(temperature=1.0)}
Answers = dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Of decoding a batch. seconds: from the end of the last prompt; tokens: drawn since."""

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    answers: Answers


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. speed_up: of tokens a second, the median of the pairs, and least and largest of them;
    accepted: share of the drafted tokens.
    """

    workload: str
    sampling: str
    streams: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speed_up: float
    speed_up_range: tuple[float, float]
    drafted: int
    accepted: float


def main() -> int:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--tokens", type=int, default=7, help="most tokens drafted in one step")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each batch, plain and drafting")
    parser.add_argument("--streams", type=int, nargs="+", default=list(_STREAMS))
    parser.add_argument("--samplings", nargs="+", default=list(_SAMPLINGS), choices=list(_SAMPLINGS))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--write", action="store_true", help=f"store {_RESULTS.name}")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_grad_enabled(False)
    torch.set_num_threads(os.cpu_count() or 1)
    text = load_text_model(resolve_model(DEFAULT_MODEL))
    rows: list[Row] = []
    with exact_runner() as runner:
        for workload, sampling, streams in product(arguments.workloads, arguments.samplings, arguments.streams):
            rows.append(measured(runner, text, workload, sampling, streams, arguments))
            # A machine that turns out to be busy need not be waited for.
            print(rows[-1], file=sys.stderr)
    Console(width=130).print(_table(rows))
    if arguments.write:
        _write(rows)
    return 0


def measured(
    runner: CpuRunner, text: TextModel, workload: str, sampling: str, streams: int, arguments: argparse.Namespace
) -> Row:
    """One batch, plain and drafting in turn. Raises RuntimeError where their answers differ."""
    prompts = [text.encode_chat(WORKLOADS[workload](number)) for number in range(streams)]
    taken: dict[int, list[Timing]] = {0: [], arguments.tokens: []}
    for number in range(arguments.rounds):
        for tokens in sorted(taken, reverse=number % 2 == 1):
            taken[tokens].append(decode(runner, prompts, _SAMPLINGS[sampling], arguments.output, tokens))
    plain, drafting = taken.values()
    if any(one.answers != plain[0].answers for one in drafting):
        raise RuntimeError(f"{workload}, {sampling}, {streams} streams: drafting has changed an answer")
    before, after = (statistics.median(one.tokens / one.seconds for one in runs) for runs in (plain, drafting))
    speed_ups = [one.tokens / one.seconds / (of.tokens / of.seconds) for one, of in zip(drafting, plain, strict=True)]
    drafted, accepted = sum(one.drafted for one in drafting), sum(one.accepted for one in drafting)
    return Row(
        workload=workload,
        sampling=sampling,
        streams=streams,
        plain_tokens_per_s=round(before, 1),
        tokens_per_s=round(after, 1),
        speed_up=round(statistics.median(speed_ups), 3),
        speed_up_range=(round(min(speed_ups), 3), round(max(speed_ups), 3)),
        drafted=drafted // arguments.rounds,
        accepted=round(accepted / drafted, 3) if drafted else 0.0,
    )


def decode(
    runner: CpuRunner, prompts: Sequence[list[int]], sampling: Sampling, output: int, speculation_tokens: int
) -> Timing:
    """Serve the prompts at once, past ends of text."""
    limits = SchedulerLimits(
        CONTEXT, runner.spec.vocab_size, max_queue_s=1e9, prefix_cache=False, speculation_tokens=speculation_tokens
    )
    links = LinkRates(runner.spec.layout.block_bytes, 30.0)
    core = EngineCore(CoreLimits(limits), NUM_BLOCKS, b"k" * 32, Rates(2000.0, 0.015), links)
    for key, tokens in enumerate(prompts):
        packed = np.array(tokens, dtype="<u4").tobytes()
        core.handle(Submit(key, "r", packed, b"", b"", b"", sampling, 1, output, [], [], 0, 0, 1e9, ""), 0.0)
    builder, answers = StepBuilder(), {key: list[int]() for key in range(len(prompts))}
    decoding_since_s, before = 0.0, 0
    while core.scheduler.requests:
        if not decoding_since_s and not core.scheduler.queued_prefill_tokens:
            decoding_since_s, before = time.perf_counter(), sum(map(len, answers.values()))
        started_s = time.perf_counter()
        chunks = core.schedule(0.0)
        runner.submit(builder.build(chunks))
        draws = draw_tokens(runner.collect(), core.draw_rows(chunks))
        core.commit(chunks, draws, time.perf_counter() - started_s, 0.0)
        for message in core.to_front:
            for drawn in message.choices if isinstance(message, StepOutput) else ():
                answers[drawn.key] += drawn.token_ids
        core.to_front.clear()
    seconds = time.perf_counter() - decoding_since_s
    speculation = core.scheduler.speculation
    tokens_drawn = sum(map(len, answers.values())) - before
    return Timing(seconds, tokens_drawn, speculation.drafted, speculation.accepted, answers)


def _write(rows: Sequence[Row]) -> None:
    stored = [msgspec.json.decode(_RESULTS.read_bytes(), type=list[Row]) if _RESULTS.exists() else [], rows]
    by_case = {(row.workload, row.sampling, row.streams): row for rows in stored for row in rows}
    _RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(list(by_case.values())), indent=1) + b"\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table("workload", "sampling", "streams", "plain tokens/s", "tokens/s", "speed-up", "drafted", "accepted")
    for row in rows:
        table.add_row(
            *(row.workload, row.sampling, str(row.streams), f"{row.plain_tokens_per_s:.0f}", f"{row.tokens_per_s:.0f}"),
            *(f"{row.speed_up:.2f}", str(row.drafted), f"{row.accepted:.2f}"),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
