"""`python -m bench.policies --traces FOLDER`: all placement policies on simulated clusters, idle to past saturation.

For each trace, number of workers and size of cache: one table with a line for each load and policy, the highest load
at which a policy still serves the wanted share of requests within their objectives, and one plot. Worker profiles were
fixed before any policy was tuned: 20,000 tokens/s of prefill, decode steps of 8 ms + 0.05 ms for each sequence, and
400,000 or 200,000 cached tokens. Policies were tuned on the first half of the traces; the second is reported.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

from bench.policies_plot import Point, plot
from services.common.time_model import TimeModel
from services.router.policies import POLICIES
from services.router.simulator import oracle
from services.router.simulator.job import WorkerProfile
from services.router.simulator.scenario import Scenario
from services.router.simulator.simulation import simulate
from services.router.simulator.summary import Summary, summarise
from services.router.simulator.trace import Trace, compress, halves, read_trace, repeat

_RESULTS = Path(__file__).parent / "results"
_MAX_QUEUE_S = 0.2
_GOOD = "goodput_share"
_COLUMNS = (
    "load",
    "offered_rps",
    "goodput_rps",
    _GOOD,
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "hit_rate",
    "hit_rate_of_ideal",
    "refused",
    "load_imbalance",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A trace and what loads it: arrivals as many times as dense, for 16 workers. copies: for sessions, 1 for none."""

    file: str
    loads: tuple[float, ...]
    copies: int = 1


SUBJECTS = {
    "conversation": Subject("mooncake_conversation.jsonl.gz", (1.0, 4.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0)),
    "synthetic": Subject("mooncake_synthetic.jsonl.gz", (1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 10.0, 14.0)),
    "agent": Subject("agent_miniswe.jsonl.gz", (1.0, 4.0, 8.0, 16.0, 32.0), copies=40),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. tells: whether requests tell the router of their objectives."""

    folder: Path
    subject: str
    half: str
    most_requests: int
    workers: int
    cached_tokens: int
    load: float
    policy: str
    tells: bool
    seed: int


def run(case: Case) -> Summary:
    """One simulated run."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    trace = compress(_trace(case.folder, case.subject, case.half, case.most_requests, case.seed), case.load)
    profile = WorkerProfile(
        TimeModel(20_000.0, 0.008, 0.000_05),
        case.cached_tokens,
        trace.block_tokens,
        step_token_budget=1024,
        max_running=256,
        max_queue_s=_MAX_QUEUE_S,
    )
    scenario = Scenario(profile, case.workers, case.policy, _MAX_QUEUE_S, tells_objectives=case.tells, seed=case.seed)
    return summarise(scenario, trace, *simulate(scenario, trace))


@cache
def _trace(folder: Path, subject: str, half: str, most_requests: int, seed: int) -> Trace:
    of = SUBJECTS[subject]
    trace = read_trace(folder / of.file, seed=seed)
    if half != "all":
        trace = halves(trace)[half == "second"]
    if of.copies > 1:
        trace = repeat(trace, of.copies, seed=seed)
    return Trace(trace.requests[:most_requests], trace.block_tokens)


def sustained(points: Sequence[Point], share: float) -> float:
    """Requests/s up to which at least `share` are served in time, between the measured loads by straight lines.

    points: of one policy. The highest rate offered where all loads were sustained; 0 where none was.
    """
    ordered = sorted(points, key=lambda point: point.offered_rps)
    best = 0.0
    for before, after in zip([None, *ordered], ordered, strict=False):
        if after.figures[_GOOD] >= share:
            best = after.offered_rps
            continue
        if before is not None:
            high, low = before.figures[_GOOD], after.figures[_GOOD]
            best = before.offered_rps + (after.offered_rps - before.offered_rps) * (high - share) / (high - low)
        break
    return best


def main() -> None:
    """Run the sweep; print tables; write JSON and plots."""
    options = _options()
    console = Console(width=150)
    everything: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for subject in options.trace:
            for workers in options.workers:
                for cached in options.cached_tokens:
                    cases = _cases(options, subject, workers, cached)
                    points = [
                        Point(case.policy, summary.offered_rps, summary.figures() | {"load": case.load})
                        for case, summary in zip(cases, pool.map(run, cases), strict=True)
                    ]
                    title = f"{subject}, {options.half} half, {workers} workers, {cached} cached tokens"
                    console.print(_table(title, points, options.share))
                    name = f"policies_{subject}_{workers}_{cached // 1000}k{'' if options.tell else '_judged'}"
                    (options.output / f"{name}.svg").write_text(plot(title, points))
                    everything.append(
                        {
                            "title": title,
                            "tells": options.tell,
                            "runs": [{"policy": p.policy} | dict(p.figures) for p in points],
                        }
                    )
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    record = {"machine": machine, "sweeps": everything}
    (options.output / f"policies{'' if options.tell else '_judged'}.json").write_text(json.dumps(record, indent=1))


def _cases(options: argparse.Namespace, subject: str, workers: int, cached: int) -> list[Case]:
    loads: Iterable[float] = options.loads or SUBJECTS[subject].loads
    return [
        Case(
            options.traces,
            subject,
            options.half,
            options.most_requests,
            workers,
            cached,
            load * workers / 16,
            policy,
            options.tell,
            options.seed,
        )
        for load in loads
        for policy in options.policies
    ]


def _table(title: str, points: Sequence[Point], share: float) -> Table:
    table = Table(title=title)
    table.add_column("policy")
    for column in _COLUMNS:
        table.add_column(column.removesuffix("_s"), justify="right")
    for point in points:
        table.add_row(point.policy, *(f"{point.figures[column]:.4g}" for column in _COLUMNS))
    for policy in dict.fromkeys(point.policy for point in points):
        rate = sustained([point for point in points if point.policy == policy], share)
        table.caption = f"{table.caption or f'requests/s with {share:.0%} in time:'} {policy} {rate:.1f};"
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, default=os.environ.get("KVMESH_TRACES"), help="folder; else $KVMESH_TRACES")
    add("--trace", nargs="+", choices=tuple(SUBJECTS), default=list(SUBJECTS))
    add("--half", choices=("first", "second", "all"), default="second")
    add("--most-requests", type=int, default=1 << 30, help="of the half, for a quick look")
    add("--workers", nargs="+", type=int, default=[16, 128])
    add("--cached-tokens", nargs="+", type=int, default=[400_000, 200_000])
    add("--loads", nargs="+", type=float, help="for 16 workers; more workers get more in proportion")
    names = (*POLICIES, oracle.NAME)
    add("--policies", nargs="+", choices=names, default=list(names))
    add("--tell", action=argparse.BooleanOptionalAction, default=True, help="whether requests tell their objectives")
    add("--share", type=float, default=0.9, help="of requests that a sustained load serves in time")
    add("--jobs", type=int, default=os.cpu_count())
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    if options.traces is None:
        parser.error("--traces: which folder?")
    return options


if __name__ == "__main__":
    main()
