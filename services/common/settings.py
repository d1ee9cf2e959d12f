"""Configuration of a service: one frozen settings class each, validated once at start.

A value comes from, highest first: the command line (`--redis-url`), `KVMESH_<SERVICE>_REDIS_URL`, `KVMESH_REDIS_URL`
(every service), the TOML file named by `KVMESH_CONFIG` (table `[<service>]`, then `[common]`), the default.
`REDIS_URL` is honoured below all of these. Unknown flags, file keys and `KVMESH_<SERVICE>_*` variables stop the start.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

S = TypeVar("S", bound="ServiceSettings")
TABLES = ("common", "gateway", "router", "kvstore", "worker", "rank_host")


class ConfigurationError(Exception):
    """A setting is missing, unknown or wrong; the message is one line that names it."""


class ServiceSettings(BaseSettings):
    """What every service is told. Subclasses set `service` and add their own fields."""

    service: ClassVar[str] = "common"
    model_config = SettingsConfigDict(frozen=True, extra="forbid", cli_kebab_case=True, cli_hide_none_type=True)

    instance: str = Field("", description="Name of this process in logs, metrics and the registry; empty: generated.")
    listen: str = Field("127.0.0.1:0", description="gRPC address, host:port; port 0 picks a free one.")
    advertise_host: str = Field("", description="Host that others reach this process at; empty: that of `listen`.")
    metrics_listen: str = Field("127.0.0.1:0", description="Prometheus address, host:port.")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey.")
    mesh_secret: SecretStr = Field(SecretStr(""), description="Secret of the mesh, at least 16 characters.")
    mesh_secret_file: Path | None = Field(
        None, description="File with the secret (0600), where `mesh_secret` is not set."
    )
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Lowest level logged.")
    ready_file: Path | None = Field(None, description="Written (JSON: address, metrics) once the service listens.")
    drain_deadline_s: float = Field(30.0, gt=0, description="Seconds that running work may take after SIGTERM.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        fallback = {"redis_url": os.environ["REDIS_URL"]} if os.environ.get("REDIS_URL") else {}
        return (
            init_settings,
            EnvSettingsSource(settings_cls, env_prefix=_env_prefix(cls.service)),
            EnvSettingsSource(settings_cls, env_prefix="KVMESH_"),
            InitSettingsSource(settings_cls, _file_values(cls.service)),
            InitSettingsSource(settings_cls, fallback),
        )


def load_settings(cls: type[S], argv: Sequence[str]) -> S:
    """Settings of a service from all sources. Raises ConfigurationError with one line."""
    prefix = _env_prefix(cls.service)
    known = {prefix + name.upper() for name in cls.model_fields}
    unknown = sorted(key for key in os.environ if key.upper().startswith(prefix) and key.upper() not in known)
    if unknown:
        raise ConfigurationError(f"{cls.service}: unknown environment variable {unknown[0]}")
    try:
        return cls(
            _cli_settings_source=CliSettingsSource(
                cls, cli_parse_args=list(argv), cli_prog_name=f"kvmesh {cls.service}", cli_exit_on_error=False
            )
        )  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        shown = "" if "secret" in field else f"={first['input']!r}"
        raise ConfigurationError(f"{cls.service}: {field}{shown}: {first['msg']}") from None
    except SettingsError as error:
        raise ConfigurationError(f"{cls.service}: {str(error).splitlines()[0]}") from None


def split_names(value: Any) -> Any:
    """For a validator that runs before: names of a list written with commas, or given several times."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        return tuple(part.strip() for item in value for part in str(item).split(",") if part.strip())
    return value


def exit_on_configuration_error(error: ConfigurationError) -> int:
    """Print the one line; the exit status for a start that its configuration ended."""
    sys.stderr.write(f"kvmesh: {error}\n")
    return 2


def _env_prefix(service: str) -> str:
    return f"KVMESH_{service.upper()}_"


def _file_values(service: str) -> dict[str, Any]:
    tables = configuration_tables(service)
    return {**tables.get("common", {}), **tables.get(service, {})}


def configuration_tables(*more: str) -> dict[str, dict[str, Any]]:
    """Tables of the file that KVMESH_CONFIG names; none without it. Raises ConfigurationError.

    One file serves all services, so every service's table may be there; more: names beyond those.
    """
    path = os.environ.get("KVMESH_CONFIG")
    if not path:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"configuration file {path}: {error}") from None
    for name, table in tables.items():
        if name not in (*TABLES, *more):
            raise ConfigurationError(f"configuration file {path}: unknown table or key {name}")
        if not isinstance(table, dict):
            raise ConfigurationError(f"configuration file {path}: {name} is not a table")
    return tables
