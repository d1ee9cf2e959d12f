"""What all placed streams share: the mesh's other parts as a gateway sees them, and the limits of failures."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.fair_line import FairLine
from services.gateway.metrics import GatewayMetrics
from services.gateway.pulse import Pulse
from services.gateway.retry_budget import RetryBudget
from services.gateway.router_client import RouterClient
from services.gateway.worker_channels import WorkerChannels


@dataclass(frozen=True, slots=True)
class Placement:
    """Parts and limits; the latter are settings of the same names."""

    router: RouterClient
    line: FairLine
    retries: RetryBudget
    channels: WorkerChannels
    pulse: Pulse
    metrics: GatewayMetrics
    admit_patience_s: float
    admit_timeout_s: float
    stall_timeout_s: float
    max_attempts: int
    rescue_wait_s: float
