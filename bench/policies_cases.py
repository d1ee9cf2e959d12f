"""What the sweep over policies runs: traces, clusters and single runs, whose results are kept for a sweep that goes on.

Worker profiles were fixed before any policy was tuned: 20,000 tokens/s of prefill, decode steps of 8 ms + 0.05 ms for
each sequence, and 400,000 or 200,000 cached tokens. Policies were tuned on the first half of the traces; the second
is reported.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import structlog

from services.common.links import Link
from services.common.time_model import TimeModel
from services.router.simulator.job import WorkerProfile
from services.router.simulator.lower_tiers import TierProfile
from services.router.simulator.scenario import Scenario
from services.router.simulator.simulation import simulate
from services.router.simulator.summary import summarise
from services.router.simulator.trace import Trace, compress, halves, read_trace, repeat

# Figures of a run, as `Summary.figures` names them.
Figures = dict[str, float]

_MAX_QUEUE_S = 0.2


@dataclass(frozen=True, slots=True)
class Subject:
    """A trace and what loads it: arrivals as many times as dense, for 16 workers. few_loads: for what is looked at
    less closely. copies: for sessions, 1 for none.
    """

    file: str
    loads: tuple[float, ...]
    few_loads: tuple[float, ...]
    copies: int = 1


SUBJECTS = {
    "conversation": Subject("mooncake_conversation.jsonl.gz", (1.0, 4.0, 8.0, 12.0, 16.0), (8.0, 12.0)),
    "synthetic": Subject("mooncake_synthetic.jsonl.gz", (1.0, 3.0, 6.0, 10.0, 14.0), (6.0, 10.0)),
    "agent": Subject("agent_miniswe.jsonl.gz", (2.0, 8.0, 32.0), (8.0,), copies=40),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """lower_tiers: tokens in RAM and on the SSD of each worker's kvstore node, if there are any. lost_workers die
    together in the middle of a run.
    """

    workers: int
    cached_tokens: int
    lower_tiers: tuple[int, int] | None = None
    lost_workers: int = 0

    def loads(self, subject: str) -> tuple[float, ...]:
        """Those that are of interest: all for workers with the larger cache alone."""
        of = SUBJECTS[subject]
        plain = self.cached_tokens == _CACHED_TOKENS and not self.lower_tiers and not self.lost_workers
        return of.loads if plain else of.few_loads

    @property
    def title(self) -> str:
        """For tables and plots."""
        tiers = ", lower tiers" if self.lower_tiers else ""
        lost = f", {self.lost_workers} lost" if self.lost_workers else ""
        return f"{self.workers} workers, {self.cached_tokens // 1000}k cached{tiers}{lost}"


# A terabyte of SSD and 131 GB of RAM beside each worker.
_LOWER_TIERS = (1_000_000, 8_000_000)
_RAM, _SSD = Link(10e9, 0.001), Link(3e9, 0.001)

_CACHED_TOKENS = 400_000

CLUSTERS = {
    "16": Cluster(16, _CACHED_TOKENS),
    "16-half-cache": Cluster(16, _CACHED_TOKENS // 2),
    "128": Cluster(128, _CACHED_TOKENS),
    "128-half-cache": Cluster(128, _CACHED_TOKENS // 2),
    "16-tiers": Cluster(16, _CACHED_TOKENS, _LOWER_TIERS),
    "16-half-cache-tiers": Cluster(16, _CACHED_TOKENS // 2, _LOWER_TIERS),
    "128-tiers": Cluster(128, _CACHED_TOKENS, _LOWER_TIERS),
    "16-lost": Cluster(16, _CACHED_TOKENS, lost_workers=2),
    "128-lost": Cluster(128, _CACHED_TOKENS, lost_workers=16),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. load: for 16 workers. tells: whether requests tell the router of their objectives."""

    folder: Path
    subject: str
    half: str
    most_requests: int
    cluster: Cluster
    load: float
    policy: str
    tells: bool
    seed: int


def run(case: Case) -> Figures:
    """One simulated run."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    cluster = case.cluster
    whole = _trace(case.folder, case.subject, case.half, case.most_requests, case.seed)
    trace = compress(whole, case.load * cluster.workers / 16)
    profile = WorkerProfile(
        TimeModel(20_000.0, 0.008, 0.000_05),
        cluster.cached_tokens,
        trace.block_tokens,
        step_token_budget=1024,
        max_running=256,
        max_queue_s=_MAX_QUEUE_S,
    )
    scenario = Scenario(
        profile,
        cluster.workers,
        case.policy,
        _MAX_QUEUE_S,
        tells_objectives=case.tells,
        lower_tiers=TierProfile(*cluster.lower_tiers, _RAM, _SSD) if cluster.lower_tiers else None,
        lost_workers=cluster.lost_workers,
        seed=case.seed,
    )
    return summarise(scenario, trace, *simulate(scenario, trace)).figures()


def run_once(case: Case, scratch: Path | None) -> Figures:
    """The run's figures, from `scratch` where the same code has left them there."""
    if scratch is None:
        return run(case)
    file = scratch / f"{_name(case)}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(run(case)))
        part.rename(file)
    figures: Figures = json.loads(file.read_text())
    return figures


def _name(case: Case) -> str:
    fields = json.dumps(asdict(case) | {"folder": ""}, sort_keys=True)
    return blake2b(fields.encode() + _code_digest(), digest_size=16).hexdigest()


@cache
def _code_digest() -> bytes:
    """Of all that a run executes: every module of the services that is loaded by now."""
    digest = blake2b(Path(__file__).read_bytes())
    for name, module in sorted(sys.modules.items()):
        if name.startswith("services.") and module.__file__:
            digest.update(Path(module.__file__).read_bytes())
    return digest.digest()


@cache
def _trace(folder: Path, subject: str, half: str, most_requests: int, seed: int) -> Trace:
    of = SUBJECTS[subject]
    trace = read_trace(folder / of.file, seed=seed)
    if half != "all":
        trace = halves(trace)[half == "second"]
    if of.copies > 1:
        trace = repeat(trace, of.copies, seed=seed)
    return Trace(trace.requests[:most_requests], trace.block_tokens)
