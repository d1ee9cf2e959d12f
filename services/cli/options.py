"""What `kvmesh up` is told."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.cli.errors import CliError
from services.common.models import DEFAULT_MODEL
from services.common.settings import configuration_tables


class MeshOptions(BaseModel):
    """Sizes and addresses of a local mesh. What is None is left to the service's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: int = Field(1, ge=0, le=1024)
    prefill_workers: int = Field(0, ge=0, le=1024)
    decode_workers: int = Field(0, ge=0, le=1024)
    kvstores: int = Field(1, ge=0, le=16)
    routers: int = Field(1, ge=1, le=16)
    gateways: int = Field(1, ge=1, le=16)
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    on_demand: tuple[str, ...] = ()
    max_loaded_models: int = Field(2, ge=1, le=256)
    unload_idle_s: float = Field(300.0, ge=0)
    engine: Literal["model", "sim"] | None = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    weight_dtype: Literal["dtype", "int8", "int8-dynamic", "int4", "float8"] | None = None
    tensor_parallel: int | None = Field(None, ge=1, le=64)
    pipeline_parallel: int | None = Field(None, ge=1, le=64)
    expert_parallel: int | None = Field(None, ge=1, le=64)
    kv_cache_mb: int | None = Field(None, ge=1)
    kvstore_mb: int | None = Field(None, ge=1)
    kvstore_ssd_mb: int | None = Field(None, ge=16)
    policy: str | None = None
    http_host: str = "127.0.0.1"
    http_port: int = Field(8080, ge=1, le=65535)
    redis_url: str = ""
    threads: int | None = Field(None, ge=1)
    trace_sampling_percent: float = Field(100.0, ge=0, le=100)
    start_timeout_s: float = Field(180.0, gt=0)

    @property
    def roles(self) -> tuple[str, ...]:
        """Of each worker, in the order of their numbers."""
        return ("both",) * self.workers + ("prefill",) * self.prefill_workers + ("decode",) * self.decode_workers

    @property
    def fair_threads(self) -> int:
        """Compute threads of each worker when nothing else says: the cores shared out."""
        return max(1, (os.cpu_count() or 1) // (len(self.roles) + min(self.max_loaded_models, len(self.on_demand))))


def mesh_options(**values: object) -> MeshOptions:
    """Checked options; absent (None) values take their defaults. Raises CliError naming the option."""
    given = {name: value for name, value in values.items() if value is not None}
    if {"prefill_workers", "decode_workers"} & given.keys():
        given.setdefault("workers", 0)
    if given.get("on_demand") and given.get("workers") == 0:
        given.setdefault("models", ())
    try:
        options = MeshOptions(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise CliError(f"--{name}={first['input']!r}: {first['msg']}") from None
    if options.workers + options.decode_workers < 1 and not options.on_demand:
        raise CliError(f"--workers={options.workers}: no worker would answer, those for prompts aside")
    if len(options.roles) < len(options.models):
        raise CliError(f"--workers={len(options.roles)}: fewer than the {len(options.models)} models")
    return options


def configured_redis_url() -> str:
    """Redis as environment or configuration file name it, with the services' precedence; empty: an embedded Valkey.

    Raises ConfigurationError.
    """
    of_file = configuration_tables().get("common", {}).get("redis_url", "")
    return os.environ.get("KVMESH_REDIS_URL") or str(of_file) or os.environ.get("REDIS_URL", "")
