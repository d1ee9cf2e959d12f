"""What is known of one worker beyond its row, and what a report teaches of its speed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter

from services.common.registry import LocationRecord
from services.common.step_costs import StepCosts, assumed_costs
from services.router.calibration import Pace
from services.router.domain import Identity, Load, Placement
from services.router.policies.view import WorkerRows
from services.router.promises import Promises
from services.router.rates import StepSlope
from services.router.recent_names import RecentNames
from services.router.worker_adapters import WorkerAdapters

# Of a worker that has measured none.
DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
DEFAULT_DECODE_STEP_S = 0.03
COST_NAMES = tuple(each.name for each in fields(StepCosts))
costs_of = attrgetter(*COST_NAMES)


@dataclass(slots=True)
class PendingAttempt:
    """A grant that no report shows yet; pulls: bytes that it is to pull, by holder.

    pairs: of its prompt's tokens with those before them. work_s, prefill_s: all that the worker will have to do for it,
    and the prompt's part. priority: a PriorityClass, 0 counting as the most urgent. tpot_s: its objective, 0 for none.
    """

    tokens: int
    blocks: int
    granted_s: float
    pulls: tuple[tuple[str, float], ...] = ()
    pairs: float = 0.0
    work_s: float = 0.0
    prefill_s: float = 0.0
    priority: int = 0
    tpot_s: float = 0.0

    @classmethod
    def of(cls, placement: Placement, granted_s: float, *, priority: int = 0, tpot_s: float = 0.0) -> PendingAttempt:
        """What a placement adds to its worker's load."""
        return cls(
            tokens=placement.prefill_tokens,
            blocks=placement.num_blocks,
            granted_s=granted_s,
            pulls=placement.pulled_bytes,
            pairs=placement.prefill_pairs,
            work_s=placement.work_s,
            prefill_s=placement.prefill_s,
            priority=priority,
            tpot_s=tpot_s,
        )


@dataclass(slots=True)
class Worker:
    """What the row cannot hold."""

    record: LocationRecord
    row: int
    identity: Identity | None = None
    progress: int = -1
    pending: dict[str, PendingAttempt] = field(default_factory=dict)
    slope: StepSlope = field(default_factory=StepSlope)
    pace: Pace = field(default_factory=Pace)
    # Attempts that reports have lately shown to be admitted or ended.
    shown: RecentNames = field(default_factory=RecentNames)
    promises: Promises = field(default_factory=Promises)
    adapters: WorkerAdapters = field(default_factory=WorkerAdapters)


def learned(rows: WorkerRows, worker: Worker, load: Load) -> tuple[float, ...]:
    """The columns from prefill_tokens_per_s to least_step_s; what the worker has not measured stays."""
    row, identity = worker.row, worker.identity
    prefill_tokens_per_s, decode_step_s = load.prefill_tokens_per_s, load.decode_step_s
    idle_step_s = (identity.decode_step_s if identity else 0.0) or DEFAULT_DECODE_STEP_S
    slope_s = worker.slope.update(idle_step_s, decode_step_s, load.decoding_sequences)
    if prefill_tokens_per_s <= 0:
        prefill_tokens_per_s = float(rows["prefill_tokens_per_s"][row])
    if decode_step_s <= 0:
        decode_step_s = float(rows["decode_step_s"][row])
    costs, least_step_s = load.step_costs, 0.0
    if costs is not None:
        least_step_s, sequence_s = costs.fixed_s, costs.decode_sequence_s
    else:
        least_step_s = max(0.0, decode_step_s - slope_s * max(0, load.decoding_sequences - 1))
        costs, sequence_s = assumed_costs(prefill_tokens_per_s, least_step_s), slope_s
    fixed_s, decoding_s, token_s, pair_s, _, context_s = costs_of(costs)
    slope_s = sequence_s + context_s * (load.context_tokens / max(1, load.decoding_sequences))
    return (
        *(prefill_tokens_per_s, decode_step_s, slope_s),
        load.step_tokens or float(rows["step_token_budget"][row]),
        *(fixed_s, decoding_s, token_s, pair_s, sequence_s, context_s, least_step_s),
    )
