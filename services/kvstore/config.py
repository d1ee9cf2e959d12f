"""Settings of a kvstore node."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.settings import ServiceSettings
from services.common.transfer.endpoint import TransportMode

_MIB = 2**20


class KvStoreSettings(ServiceSettings):
    """What a kvstore node is told."""

    service: ClassVar[str] = "kvstore"

    ram_bytes: int = Field(2**30, ge=_MIB, description="Memory for blocks.")
    max_lease_s: float = Field(10.0, gt=0, description="Longest time that one pull may hold its blocks.")
    transport: TransportMode = Field("auto", description="auto: shared memory on one host, else UCX, else gRPC.")
    pull_listen: str = Field(
        "127.0.0.1:0", description="UCX address, host:port; UCX listens on all interfaces, the host is advertised."
    )
