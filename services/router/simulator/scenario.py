"""What is simulated, and what became of each request."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.simulator.job import WorkerProfile
from services.router.simulator.lower_tiers import TierProfile
from services.router.simulator.mesh_view import Delays
from services.router.simulator.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, how it decides, what clients want of it, and what befalls it.

    lower_tiers: None for workers that have their own cache and nothing else. lost_workers die together when half of
    the requests have arrived. patience_s: a request that has waited in the line for longer is refused.
    """

    profile: WorkerProfile
    num_workers: int
    policy: str
    max_queue_s: float
    ttft_objective_s: float = 2.0
    tpot_objective_s: float = 0.1
    patience_s: float = 10.0
    # Whether requests tell the router of the objectives, or are only judged by them.
    tells_objectives: bool = True
    lower_tiers: TierProfile | None = None
    lost_workers: int = 0
    seed: int = 0
    delays: Delays = field(default_factory=Delays)


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of a request; times are absolute, -1 where there is none."""

    request: TraceRequest
    index: int
    arrived_s: float
    attempts: int = 0
    refused: bool = False
    worker: int = -1
    cached_tokens: int = 0
    pulled_tokens: int = 0
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    granted_s: float = 0.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean time of each further token, 0 where there is none."""
        further = self.request.output_tokens - 1
        return (self.ended_s - self.first_token_s) / further if further else 0.0
