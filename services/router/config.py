"""Settings of a router."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.common.settings import ServiceSettings

PolicyName = Literal["predicted_ttft", "prefix_hash", "least_loaded", "round_robin"]


class RouterSettings(ServiceSettings):
    """One router process."""

    service: ClassVar[str] = "router"

    policy: PolicyName = Field("predicted_ttft", description="How a worker is chosen.")
    max_queue_s: float = Field(
        0.2, gt=0, description="Work in a worker's queue beyond which requests wait in their gateway instead."
    )
    pending_timeout_s: float = Field(
        5.0, gt=0, description="A grant that no report shows for this long is no longer counted as load."
    )
