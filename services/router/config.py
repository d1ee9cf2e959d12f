"""Settings of a router."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from services.common.settings import ServiceSettings

PolicyName = Literal["predicted_ttft", "e2", "prefix_hash", "least_loaded", "round_robin"]


class RouterSettings(ServiceSettings):
    """One router process."""

    service: ClassVar[str] = "router"

    policy: PolicyName = Field("predicted_ttft", description="How a worker is chosen.")
    max_queue_s: float = Field(
        0.2, gt=0, description="Work in a worker's queue beyond which requests wait in their gateway instead."
    )
    admin_keys_file: Path | None = Field(
        None, description="Admin keys (hashed) and their owners; none: nobody may use the control API."
    )
    explained_requests: int = Field(
        4096, ge=0, le=1_000_000, description="Requests whose decisions are kept for `kvmesh ctl explain`."
    )
    unload_idle_s: float = Field(
        0.0, ge=0, description="A pool of workers that nobody has used for so long wants none; 0: always one at least."
    )
    pending_timeout_s: float = Field(
        5.0, gt=0, description="A grant that no report shows for this long is no longer counted as load."
    )
