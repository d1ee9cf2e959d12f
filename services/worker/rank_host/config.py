"""Settings of a rank host."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.common.models import DEFAULT_MODEL
from services.common.settings import ServiceSettings, split_names


class RankHostSettings(ServiceSettings):
    """What a rank host is told; lists are written with commas."""

    service: ClassVar[str] = "rank_host"

    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (DEFAULT_MODEL,), description="Names, PATHs or NAME=PATHs of the models whose files are here."
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Compute threads, shared out to the ranks of a replica; 0: one for each core."
    )
    max_ranks: int = Field(8, ge=1, le=64, description="Most ranks that run here at once.")

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_names(value)
