"""What `kvmesh ctl rollout --model | --worker-flags` is told, and what it makes of the workers' command lines. Pure."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.cli.canary_verdict import Limits
from services.cli.errors import CliError

# What the supervisor alone decides, and what a version cannot change.
_RESERVED = frozenset(
    {"instance", "listen", "metrics-listen", "mesh-secret-file", "ready-file", "model", "role", "revision"}
)


class CanaryOptions(BaseModel):
    """model: NAME=PATH, or PATH where the mesh serves one name; empty: as it is. Rates and shares in percent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = ""
    worker_flags: str = ""
    version: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    share: int = Field(5, ge=1, le=50)
    analysis_requests: int = Field(50, ge=1)
    analysis_s: float = Field(300.0, ge=0)
    quality_tolerance: float = Field(0.1, gt=0)
    latency_tolerance: float = Field(2.0, ge=1)
    error_tolerance: float = Field(1.0, ge=0, le=100)

    @property
    def limits(self) -> Limits:
        """Of the analysis."""
        return Limits(self.quality_tolerance, self.latency_tolerance, self.error_tolerance / 100)

    @property
    def flags(self) -> dict[str, str]:
        """Worker flags by name, without dashes. Raises CliError."""
        return parse_flags(self.worker_flags)


def canary_options(values: dict[str, Any]) -> CanaryOptions:
    """Checked options. Raises CliError naming the option."""
    try:
        options = CanaryOptions(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise CliError(f"--{name}={first['input']!r}: {first['msg']}") from None
    if not options.model and not options.flags:
        raise CliError("nothing is new: --model or --worker-flags says what")
    return options


def new_label() -> str:
    """A version's label by the time of day, for one that was given none."""
    return time.strftime("r%Y%m%d-%H%M%S")


def parse_flags(text: str) -> dict[str, str]:
    """Values by name of "--name value --other=value". Raises CliError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CliError(f"--worker-flags: {error}") from None
    flags: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, separator, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise CliError(f"--worker-flags: {word!r} is not --NAME VALUE")
        if name in _RESERVED:
            raise CliError(f"--worker-flags: --{name} is not to be changed by a rollout")
        if not separator:
            value = next(rest, "--")
            if value.startswith("--"):
                raise CliError(f"--worker-flags: --{name} has no value")
        flags[name] = value
    return flags


def with_flags(command: Sequence[str], flags: dict[str, str]) -> tuple[str, ...]:
    """A command line of `--name value` pairs with these values, in place or at the end."""
    words, left = list(command), dict(flags)
    for at, word in enumerate(words[:-1]):
        if word.startswith("--") and (value := left.pop(word.removeprefix("--"), None)) is not None:
            words[at + 1] = value
    return (*words, *(word for name, value in left.items() for word in (f"--{name}", value)))


def flag_of(command: Sequence[str], name: str) -> str:
    """The value of a flag in a command line; empty where there is none."""
    words = list(command)
    return words[words.index(f"--{name}") + 1] if f"--{name}" in words else ""
