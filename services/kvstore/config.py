"""Settings of a kvstore node."""

from __future__ import annotations

from pathlib import Path
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
    partial_bytes: int = Field(
        0, ge=0, description="Most memory for blocks whose ranks have not all pushed yet; 0: an eighth of ram_bytes."
    )
    partial_max_age_s: float = Field(10.0, gt=0, description="Longest time that such a block waits for the others.")
    owner_ram_bytes: int = Field(0, ge=0, description="Most memory for blocks of one owner; 0: no limit.")
    replicate_leases: int = Field(
        16,
        ge=0,
        description="Pulls of a block within the window after which another node is asked for a copy; 0: never.",
    )
    replicate_window_s: float = Field(
        10.0, gt=0, description="The window, and the pause before a further node is asked."
    )
    replicate_nodes: int = Field(2, ge=1, description="Most nodes that are asked for a copy of the same chain.")
    replicate_bytes_per_s: float = Field(
        128.0 * 2**20, ge=0, description="Most that this node copies from others; 0: nothing."
    )
    busy_leases: int = Field(
        8,
        ge=1,
        description="Pulls at a time from which the node is busy: it copies nothing, and pulls of its host count too.",
    )
    ssd_path: Path | None = Field(None, description="Directory for blocks on the SSD, for this node alone.")
    ssd_bytes: int = Field(0, ge=0, description="Space for them; 0: no SSD tier.")
    ssd_segment_bytes: int = Field(0, ge=0, description="Size of a file there; 0: by the space.")
    ssd_max_age_s: float = Field(7 * 86400.0, ge=0, description="Blocks older than this are not kept; 0: no limit.")
    ssd_encrypt: bool = Field(True, description="Encrypt payloads under a key of their owner.")
    owner_ssd_bytes: int = Field(0, ge=0, description="Most payload of one owner on the SSD; 0: no limit.")
