"""`python -m bench.policies --traces FOLDER`: all placement policies on simulated clusters, idle to past saturation.

For each trace: a table with a line for each cluster and load and a column for each policy, the figures that policies
are judged by, and one plot. A sweep that was ended goes on where it was with the same `--scratch` folder.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.policies_cases import CLUSTERS, SUBJECTS, Case, run_once
from bench.policies_plot import plot
from bench.policies_verdict import Point, sustained, verdict
from services.router.policies import POLICIES
from services.router.simulator import oracle

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the sweep; print tables; write JSON and plots."""
    options = _options()
    console = Console(width=250)
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        for subject in options.trace:
            sweeps: dict[str, list[Point]] = {}
            for cluster in options.clusters:
                cases = _cases(options, subject, cluster)
                runs = pool.map(partial(run_once, scratch=options.scratch), cases)
                points = [Point(case.policy, case.load, figures) for case, figures in zip(cases, runs, strict=True)]
                sweeps[CLUSTERS[cluster].title] = points
                console.print(_table(points), f"{subject}, {CLUSTERS[cluster].title}", _judged(points, options.share))
            _write(options, subject, sweeps)


def _cases(options: argparse.Namespace, subject: str, cluster: str) -> list[Case]:
    return [
        Case(
            options.traces,
            subject,
            options.half,
            options.most_requests,
            CLUSTERS[cluster],
            load,
            policy,
            options.tell,
            options.seed,
        )
        for load in options.loads or CLUSTERS[cluster].loads(subject)
        for policy in options.policies
    ]


def _table(points: Sequence[Point]) -> Table:
    """Each cell: requests/s within both objectives, TTFT p50 and p99 in seconds, share of the ideal hit rate."""
    policies = list(dict.fromkeys(point.policy for point in points))
    table = Table("load (offered/s)", *policies, box=box.MARKDOWN)
    for load in dict.fromkeys(point.load for point in points):
        of_load = {point.policy: point.figures for point in points if point.load == load}
        offered = of_load[policies[0]]["offered_rps"]
        cells = (
            f"{of['goodput_rps']:.2f}; {of['ttft_p50_s']:.2f}, {of['ttft_p99_s']:.2f}; {of['hit_rate_of_ideal']:.0%}"
            for of in (of_load[policy] for policy in policies)
        )
        table.add_row(f"{load:g} ({offered:.1f})", *cells)
    return table


def _judged(points: Sequence[Point], share: float) -> str:
    rates = ", ".join(f"{policy} {rate:.1f}" for policy, rate in sustained(points, share).items())
    return f"requests/s with {share:.0%} in time: {rates}\n{verdict(points)}\n"


def _write(options: argparse.Namespace, subject: str, sweeps: dict[str, list[Point]]) -> None:
    name = f"policies_{subject}{'' if options.tell else '_judged'}"
    title = f"{subject}, {options.half} half"
    record = {
        "trace": SUBJECTS[subject].file,
        "half": options.half,
        "tells": options.tell,
        "seed": options.seed,
        "clusters": {
            cluster: [{"policy": point.policy, "load": point.load, **point.figures} for point in points]
            for cluster, points in sweeps.items()
        },
    }
    (options.output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.output / f"{name}.svg").write_text(plot(title, sweeps))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, default=os.environ.get("KVMESH_TRACES"), help="folder; else $KVMESH_TRACES")
    add("--trace", nargs="+", choices=tuple(SUBJECTS), default=list(SUBJECTS))
    add("--half", choices=("first", "second", "all"), default="second")
    add("--most-requests", type=int, default=1 << 30, help="of the half, for a quick look")
    add("--clusters", nargs="+", choices=tuple(CLUSTERS), default=list(CLUSTERS))
    add("--loads", nargs="+", type=float, help="for 16 workers; more workers get more in proportion")
    names = (*POLICIES, oracle.NAME)
    add("--policies", nargs="+", choices=names, default=list(names))
    add("--tell", action=argparse.BooleanOptionalAction, default=True, help="whether requests tell their objectives")
    add("--share", type=float, default=0.9, help="of requests that a sustained load serves in time")
    add("--scratch", type=Path, help="folder for the figures of single runs, so that a sweep can go on")
    add("--jobs", type=int, default=os.cpu_count())
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    if options.traces is None:
        parser.error("--traces: which folder?")
    return options


if __name__ == "__main__":
    main()
