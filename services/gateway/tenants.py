"""What each tenant may have: weight, classes, objectives, quotas, fallback. From a TOML file that may change any time.

[default]                    # tenants without a table of their own, and what a table leaves out
priority = "standard"        # class of requests that name none
most_urgent = "interactive"  # no request may be more urgent

[tenants.acme]
weight = 4.0                 # share of the workers, against other tenants that wait
requests_per_minute = 600
tokens_per_minute = 200000
concurrent_requests = 32
context_tokens = 8192        # most tokens of prompt and output together
fallback_model = "small"     # answers when no worker of the model would meet the objectives

[tenants.acme.objectives.interactive]
ttft_s = 1.0
tpot_s = 0.05
"""

from __future__ import annotations

import re
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from services.common.fair_queue import RequestClass
from services.common.settings import ConfigurationError
from services.common.watched_file import WatchedFile
from services.gateway.errors import InvalidRequest

ClassName = Literal["interactive", "standard", "batch"]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")


class ClassObjectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds from arrival to the first token, and for each further one; 0: no objective."""

    ttft_s: _NotNegative = 0.0
    tpot_s: _NotNegative = 0.0


class ObjectivesByClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Objectives of requests that bring none."""

    interactive: ClassObjectives = ClassObjectives()
    standard: ClassObjectives = ClassObjectives()
    batch: ClassObjectives = ClassObjectives()

    def of(self, kind: RequestClass) -> ClassObjectives:
        """Those of one class."""
        objectives: ClassObjectives = getattr(self, kind.name.lower())
        return objectives


class TenantPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's table; None: no such quota."""

    weight: _Positive = 1.0
    priority: ClassName = "standard"
    most_urgent: ClassName = "interactive"
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent_requests: _Count | None = None
    context_tokens: _Count | None = None
    fallback_model: str = ""
    objectives: ObjectivesByClass = ObjectivesByClass()

    def class_of(self, priority: int) -> RequestClass:
        """The class of a request. priority: of proto PriorityClass, 0 unset. Raises InvalidRequest."""
        kind = RequestClass(priority) if priority else RequestClass[self.priority.upper()]
        if kind < RequestClass[self.most_urgent.upper()]:
            raise InvalidRequest(
                f"priority: {self.most_urgent} is the most urgent that this tenant may use", "priority"
            )
        return kind

    @property
    def has_quota(self) -> bool:
        """Whether anything has to be counted."""
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests))


class Tenants:
    """Knows the policy of every tenant. With no file all have the default."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError when the file cannot be read or is wrong."""
        self._file = (
            None if path is None else WatchedFile(path, parse_tenants, service="gateway", setting="tenants_file")
        )
        self._default = TenantPolicy()

    def refresh(self, now_s: float) -> None:
        """Take a changed file. now_s: monotonic time."""
        if self._file is not None:
            self._file.refresh(now_s)

    def of(self, tenant: str) -> TenantPolicy:
        """The tenant's policy."""
        if self._file is None:
            return self._default
        policies = self._file.value
        return policies.get(tenant, policies[""])

    def weight_of(self, tenant: str) -> float:
        """The tenant's share against others."""
        return self.of(tenant).weight


def parse_tenants(text: str) -> dict[str, TenantPolicy]:
    """Policies by tenant, the default under "". Raises ConfigurationError naming the line."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(str(error)) from None
    for name in document.keys() - {"default", "tenants"}:
        raise _wrong(text, [name], "only [default] and [tenants.NAME] are known")
    default = document.get("default", {})
    policies = {"": _policy(text, ["default"], default)}
    tables = document.get("tenants", {})
    if not isinstance(tables, dict):
        raise _wrong(text, ["tenants"], "must be tables [tenants.NAME]")
    for name, table in tables.items():
        if not _TENANT.fullmatch(name):
            raise _wrong(text, ["tenants", name], "a tenant has 1 to 64 letters, digits, dots, - and _")
        if not isinstance(table, dict):
            raise _wrong(text, ["tenants", name], "must be a table")
        policies[name] = _policy(text, ["tenants", name], table, default)
    return policies


def _policy(text: str, where: list[str], table: Any, default: dict[str, Any] | None = None) -> TenantPolicy:
    try:
        msgspec.convert(table, TenantPolicy)
        policy = msgspec.convert({**(default or {}), **table}, TenantPolicy)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        unknown = re.fullmatch(r"Object contains unknown field `(.*)`", reason)
        keys = [key for key in [*path.strip("`").split("."), unknown[1] if unknown else ""] if key]
        raise _wrong(text, [*where, *keys], reason) from None
    if RequestClass[policy.priority.upper()] < RequestClass[policy.most_urgent.upper()]:
        raise _wrong(text, [*where, "priority"], "more urgent than most_urgent allows")
    return policy


def _wrong(text: str, path: list[str], reason: str) -> ConfigurationError:
    line = _line_of(text, path)
    where = f"line {line}: " if line else ""
    return ConfigurationError(f"{where}{'.'.join(path)}: {reason}")


def _line_of(text: str, path: list[str]) -> int:
    """The line that names most of a path of tables and a key; 0 where none names any of it."""
    best, best_depth, table = 0, 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
        here = table if header is not None else [*table, key[1]] if key is not None else []
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, path, strict=False)))
        if depth > best_depth:
            best, best_depth = number, depth
    return best
