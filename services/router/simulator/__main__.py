"""`python -m services.router.simulator`: a trace through a simulated cluster; also `kvmesh simulate`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from services.common.links import Link
from services.common.time_model import TimeModel
from services.router.config import RouterSettings
from services.router.policies import POLICIES
from services.router.simulator import oracle
from services.router.simulator.job import WorkerProfile
from services.router.simulator.lower_tiers import TierProfile
from services.router.simulator.planner import NotEnoughError, find_workers
from services.router.simulator.scenario import Scenario
from services.router.simulator.simulation import simulate
from services.router.simulator.summary import Summary, summarise
from services.router.simulator.trace import Trace, TraceError, compress, halves, read_trace, repeat

_DEFAULTS = {name: field.default for name, field in RouterSettings.model_fields.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print; the exit status."""
    # Refusals are counted in the result; a line for each would bury it.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        trace = _trace(options)
        scenario = _scenario(options, trace.block_tokens)
        summary = _planned(scenario, trace, options.find_workers) if options.find_workers else _run(scenario, trace)
    except (TraceError, NotEnoughError, ValueError) as error:
        print(f"kvmesh: simulate: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary.as_json()) if options.json else _table(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvmesh simulate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="Mooncake or agent JSON lines, or Azure CSV; may be gzipped")
    add("--half", choices=("all", "first", "second"), default="all", help="part of the trace")
    add("--load", type=_positive(float), default=1.0, help="how many times as dense arrivals are")
    add("--copies", type=_positive(int), default=1, help="times that a trace of sessions is overlaid on itself")
    add("--workers", type=_positive(int), default=16)
    add("--policy", choices=(*POLICIES, oracle.NAME), default=_DEFAULTS["policy"])
    add("--max-queue-s", type=_positive(float), default=_DEFAULTS["max_queue_s"], help="the router's setting")
    add("--patience-s", type=_positive(float), default=10.0, help="longest wait in the gateway's line")
    add("--ttft-objective-s", type=_positive(float), default=2.0)
    add("--tpot-objective-s", type=_positive(float), default=0.1)
    add("--prefill-tokens-per-s", type=_positive(float), default=20_000.0, help="speed of one worker")
    add("--decode-step-s", type=_positive(float), default=0.008, help="a decode step of no sequence")
    add("--decode-sequence-s", type=float, default=0.000_05, help="what each sequence adds to it")
    add("--cached-tokens", type=_positive(int), default=400_000, help="KV pool of one worker")
    add(
        "--lower-tiers",
        type=_tokens,
        metavar="RAM,SSD",
        help="tokens that a kvstore node on each worker's host keeps in each; and workers pull from each other",
    )
    add("--ram-bytes-per-s", type=_positive(float), default=10e9, help="rate of a pull from memory")
    add("--ssd-bytes-per-s", type=_positive(float), default=3e9, help="rate at which a node's SSD is read")
    add("--pull-setup-s", type=_positive(float), default=0.001, help="to a pull's first byte; an SSD adds as much")
    add("--step-token-budget", type=_positive(int), default=1024)
    add("--max-running", type=_positive(int), default=256)
    add(
        "--tell-objectives",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether requests tell the router of the objectives, or are only judged by them",
    )
    add("--survive", type=int, default=0, metavar="K", help="lose K workers when half of the requests have arrived")
    add("--find-workers", type=_positive(float), metavar="SHARE", help="least workers for this share of goodput")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="one object instead of a table")
    return parser


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if value <= 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"
    return parse


def _tokens(text: str) -> tuple[int, int]:
    ram, ssd = map(int, text.split(","))
    if ram < 0 or ssd < 0:
        raise ValueError
    return ram, ssd


_tokens.__name__ = "RAM,SSD"


def _tiers(options: argparse.Namespace) -> TierProfile | None:
    if options.lower_tiers is None:
        return None
    ram_tokens, ssd_tokens = options.lower_tiers
    ram, ssd = (Link(rate, options.pull_setup_s) for rate in (options.ram_bytes_per_s, options.ssd_bytes_per_s))
    return TierProfile(ram_tokens, ssd_tokens, ram, ssd)


def _trace(options: argparse.Namespace) -> Trace:
    trace = read_trace(options.trace, seed=options.seed)
    if options.half != "all":
        trace = halves(trace)[options.half == "second"]
    if options.copies > 1:
        if not trace.has_sessions:
            raise ValueError("--copies: only a trace of sessions can be repeated")
        trace = repeat(trace, options.copies, seed=options.seed)
    return compress(trace, options.load)


def _scenario(options: argparse.Namespace, block_tokens: int) -> Scenario:
    if options.survive < 0 or options.survive >= options.workers:
        raise ValueError(f"--survive={options.survive}: not below --workers={options.workers}")
    if options.max_running > options.step_token_budget:
        raise ValueError("--max-running: above --step-token-budget")
    time_model = TimeModel(options.prefill_tokens_per_s, options.decode_step_s, options.decode_sequence_s)
    return Scenario(
        profile=WorkerProfile(
            time_model,
            options.cached_tokens,
            block_tokens,
            options.step_token_budget,
            options.max_running,
            max_queue_s=0.2,
        ),
        num_workers=options.workers,
        policy=options.policy,
        max_queue_s=options.max_queue_s,
        ttft_objective_s=options.ttft_objective_s,
        tpot_objective_s=options.tpot_objective_s,
        patience_s=options.patience_s,
        tells_objectives=options.tell_objectives,
        lower_tiers=_tiers(options),
        lost_workers=options.survive,
        seed=options.seed,
    )


def _run(scenario: Scenario, trace: Trace) -> Summary:
    return summarise(scenario, trace, *simulate(scenario, trace))


def _planned(scenario: Scenario, trace: Trace, share: float) -> Summary:
    """The run with the least workers that meets the share."""
    runs: dict[int, Summary] = {}

    def meets(workers: int) -> bool:
        runs[workers] = _run(replace(scenario, num_workers=workers), trace)
        return runs[workers].goodput_share >= share

    return runs[find_workers(meets, first=scenario.lost_workers + 1)]


def _table(summary: Summary) -> str:
    rows = summary.as_json()
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in rows.items())


def _shown(value: str | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
