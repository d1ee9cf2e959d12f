"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from services.common.models import DEFAULT_MODEL, resolve_model
from services.common.settings import ServiceSettings, split_names
from services.gateway.tools.call_format import FORMATS, GENERIC

Names = Annotated[tuple[str, ...], NoDecode]


class GatewaySettings(ServiceSettings):
    """What a gateway is told; lists are written with commas."""

    service: ClassVar[str] = "gateway"

    routers: Names = Field(("127.0.0.1:7600",), min_length=1, description="Router addresses, tried in this order.")
    models: Names = Field((DEFAULT_MODEL,), min_length=1, description="Artifacts whose tokenizers are loaded.")
    on_demand_models: Names = Field(
        (), description="Names of those of `models` that are loaded when they are asked for: requests wait meanwhile."
    )
    call_formats: Names = Field(
        (),
        description="NAME=FORMAT of those of `models` whose calls of functions are not written as their template has.",
    )
    max_cold_requests: int = Field(256, ge=1, description="Requests that wait for models to be loaded before 503.")
    max_cold_wait_s: float = Field(120.0, gt=0, description="Longest such wait.")
    load_bytes_per_s: float = Field(
        2.0**28, gt=0, description="Rate of the forecast of a model's first load; later ones go by what those took."
    )
    load_start_s: float = Field(5.0, ge=0, description="What that forecast adds to the reading.")
    keys_file: Path | None = Field(None, description="API keys (hashed) and their tenants; none: no authentication.")
    tenants_file: Path | None = Field(
        None, description="Weights, classes, objectives, quotas and fallbacks of tenants; none: all are equal."
    )
    generations_file: Path | None = Field(
        None, description="Keeps the generations of cleared tenants, for a Redis that forgets them; none: not kept."
    )
    prices_file: Path | None = Field(None, description="Prices of models; none: nothing costs anything.")
    usage_file: Path | None = Field(
        None, description="Keeps what was counted of usage, for a restart and a Redis that forgets it; none: not kept."
    )
    max_inflight_requests: int = Field(1024, ge=1, description="Requests in flight before 503.")
    max_waiting_requests: int = Field(512, ge=1, description="Requests that wait for a worker before 503.")
    max_tenant_waiting_requests: int = Field(256, ge=1, description="Those of one tenant before 429.")
    max_wait_s: float = Field(60.0, gt=0, description="Longest wait for a worker that has room.")
    starve_s: float = Field(10.0, gt=0, description="A less urgent class that waits has a turn at least so often.")
    starve_grants: int = Field(20, ge=1, description="The same, in turns of more urgent classes.")
    retry_burst: int = Field(256, ge=1, description="Attempts beyond the first that a tenant may make at once.")
    retry_per_s: float = Field(16.0, gt=0, description="The same, per second in the long run.")
    max_tenant_inflight_requests: int = Field(1024, ge=1, description="Requests of one tenant in flight before 429.")
    default_deadline_s: float = Field(600.0, gt=0, description="Life of a request whose client sets no deadline.")
    idempotency_window_s: float = Field(
        300.0, gt=0, le=86_400, description="Time after its end in which a request with an idempotency key is repeated."
    )
    heartbeat_s: float = Field(10.0, gt=0, description="Silence on an event stream before a comment is sent.")
    prepare_timeout_s: float = Field(15.0, gt=0, description="Longest parsing, templating and tokenising of a request.")
    text_processes: int = Field(2, ge=1, le=32, description="Processes that parse and tokenise long requests.")
    max_grammar_bytes: int = Field(65_536, ge=1, description="Largest schema or grammar of an answer, as compiled.")
    grammar_cpu_s: float = Field(1.0, gt=0, description="Most processor time that compiling one may take.")
    grammar_memory_bytes: int = Field(2**28, ge=2**20, description="Most memory that compiling one may take.")
    ask_timeout_s: float = Field(5.0, gt=0, description="Longest wait for a placement.")
    router_silence_s: float = Field(0.8, gt=0, description="Unanswered asks for so long: the next router is tried.")
    admit_patience_s: float = Field(
        1.4, gt=0, description="Silence of a granted worker, doubled each time, before the router is asked again."
    )
    admit_timeout_s: float = Field(10.0, gt=0, description="Silence of granted workers before one counts as failed.")
    stall_timeout_s: float = Field(60.0, gt=0, description="Longest silence of a worker within a request.")
    max_attempts: int = Field(
        3, ge=1, le=10, description="Workers that fail in a row, without a token, before a request."
    )
    rescue_wait_s: float = Field(30.0, gt=0, description="Longest wait of accepted work while its model has no worker.")
    worker_silence_s: float = Field(
        1.0,
        gt=0.25,
        description="Silence of a worker, which beats every 250 ms, before its work goes on elsewhere.",
    )

    files_dir: Path | None = Field(
        None, description="Directory of files and batches, which all gateways share; none: they are not served."
    )
    max_file_bytes: int = Field(200 * 2**20, ge=1, description="Largest file.")
    max_tenant_file_bytes: int = Field(10 * 2**30, ge=1, description="All files of one tenant together.")
    max_tenant_files: int = Field(1000, ge=1, description="Files of one tenant.")
    file_life_s: float = Field(
        30 * 86_400.0, ge=3600, description="Time after which files, and batches that are over, are removed."
    )
    max_batch_requests: int = Field(50_000, ge=1, description="Lines of one batch.")
    max_tenant_batches: int = Field(16, ge=1, description="Batches of one tenant that are not over, before 429.")
    max_running_batches: int = Field(8, ge=1, description="Batches that this gateway runs at a time.")
    max_batch_lines: int = Field(32, ge=1, description="Lines of all of them in flight.")

    @model_validator(mode="after")
    def _check_on_demand(self) -> Self:
        if not self.on_demand_models:
            return self
        unknown = set(self.on_demand_models) - {resolve_model(spec).name for spec in self.models}
        if unknown:
            raise ValueError(f"on_demand_models names {', '.join(sorted(unknown))}, not among models")
        return self

    @model_validator(mode="after")
    def _check_call_formats(self) -> Self:
        names = {resolve_model(spec).name for spec in self.models} if self.call_formats else set()
        known, seen = (*FORMATS, GENERIC), set[str]()
        for entry in self.call_formats:
            name, separator, call_format = entry.partition("=")
            if not separator or name not in names:
                raise ValueError(f"call_formats has {entry!r}, not NAME=FORMAT with a name among models")
            if name in seen:
                raise ValueError(f"call_formats has {name!r} twice")
            seen.add(name)
            if call_format not in known:
                raise ValueError(f"call_formats has {call_format!r}, none of {', '.join(known)}")
        return self

    @property
    def call_format_of(self) -> dict[str, str]:
        """Formats of `call_formats` by the model's name."""
        return dict(entry.split("=", 1) for entry in self.call_formats)

    @field_validator("routers", "models", "on_demand_models", "call_formats", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_names(value)
