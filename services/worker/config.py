"""Settings of a worker: one model replica on one device."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from services.common.adapter_files import LARGEST_RANK
from services.common.artifacts.settings import DEFAULT_CACHE_BYTES
from services.common.models import DEFAULT_MODEL
from services.common.settings import ConfigurationError, ServiceSettings, split_names
from services.worker.model.layout import ComputeDtype, KvDtype, WeightDtype
from services.worker.rank_calls import reachable_host

# As a model: wait to be told one.
NO_MODEL = "none"
# Of one replica.
MOST_RANKS = 64
# With rank_hosts: steps wait for what is on its way.
MOST_SPREAD_STAGING_BYTES = 2**29
# Settings of what a simulated worker does not do.
_NOT_SIMULATED = frozenset(
    {
        *("device", "weight_dtype", "threads", "exact", "kv_dtype", "kv_cache_fraction", "staging_bytes"),
        *("max_adapters", "max_adapter_rank", "max_adapter_bytes", "max_adapter_waiting", "adapter_wait_s", "pooling"),
        *("tensor_parallel", "pipeline_parallel", "expert_parallel", "rank_timeout_s", "rank_hosts"),
        *("push", "max_push_blocks", "repush_bytes_per_s", "node_ramp_s", "max_served_blocks"),
    }
)
_TIMES = frozenset({"sim_prefill_tokens_per_s", "sim_decode_step_s", "sim_decode_sequence_s", "sim_decode_context_s"})


class WorkerSettings(ServiceSettings):
    """What a worker is told."""

    service: ClassVar[str] = "worker"

    model: str = Field(
        DEFAULT_MODEL,
        description="Name, PATH or NAME=PATH of a GGUF file or a Hugging Face folder; none: wait to be told one.",
    )
    model_cache_dir: Path | None = Field(
        None,
        description="Local directory that models are copied to before they load; empty: read where they lie.",
    )
    model_cache_bytes: int = Field(
        DEFAULT_CACHE_BYTES, ge=2**20, description="Most bytes of that directory; the least recently used models go."
    )
    model_source_readers: int = Field(
        4, ge=1, le=1024, description="Most workers of the mesh that copy models from shared storage at once."
    )
    model_peer_serves: int = Field(
        4, ge=0, le=64, description="Most copies of cached models that this worker gives others at once; 0: none."
    )
    model_copy_timeout_s: float = Field(1800.0, gt=0, description="Longest time until a model has been copied.")
    revision: str = Field(
        "", max_length=64, description="Enters the model digest: tells versions of one artifact apart."
    )
    engine: Literal["model", "sim"] = Field(
        "model", description="sim: compute nothing, take the time that the sim_* settings say, and answer with words."
    )
    sim_prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="Of a simulated worker: speed of prefill.")
    sim_decode_step_s: float = Field(0.008, ge=0, description="Of a simulated worker: a step in which any decode.")
    sim_decode_sequence_s: float = Field(0.00005, ge=0, description="And for each sequence that decodes in it.")
    sim_decode_context_s: float = Field(0.0, ge=0, description="And for each token of the context of these.")
    sim_calibration: Path | None = Field(
        None, description="JSON file with the four figures of a real worker, from bench.sim_calibration."
    )
    sim_speed: float = Field(1.0, gt=0, description="Of a simulated worker: everything happens so many times as fast.")
    sim_transfers: bool = Field(
        False, description="Of a simulated worker: give and pull blocks, all zeros, through a mover as real ones do."
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: compute prompts for workers that take over, or do all where there is none; "
        "decode: take over, or do all.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs.")
    dtype: ComputeDtype = Field("bfloat16", description="Of weights, activations and KV cache.")
    weight_dtype: WeightDtype = Field(
        "dtype",
        description="What the weights of linear layers are rounded to, with dtype bfloat16; int8-dynamic on cpu, "
        "float8 on cuda without exact mode.",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="Compute threads, shared out to the processes that compute; 0: one for each core."
    )
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="Processes that share every layer of the model: heads, inner columns, vocabulary."
    )
    pipeline_parallel: int = Field(
        1, ge=1, le=64, description="Groups of such processes, each of which has some of the layers."
    )
    expert_parallel: int = Field(
        1, ge=1, le=64, description="Parts of the experts, each with tensor_parallel processes; all share the rest."
    )
    rank_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Addresses of rank hosts, with commas: after the worker's own host each runs an equal share of the "
        "processes; one that is named twice runs two.",
    )
    exact: Literal["auto", "on", "off"] = Field(
        "auto", description="Results that do not depend on the batch; auto: on on cpu, off on cuda."
    )
    kv_dtype: Literal["auto", KvDtype] = Field("auto", description="Of the KV cache, where it is not dtype; on cuda.")
    kv_cache_bytes: int = Field(
        0, ge=0, description="Size of the block pool; 0: 1 GiB on cpu, by kv_cache_fraction on cuda."
    )
    kv_cache_fraction: float = Field(
        0.9, gt=0, le=1, description="Share for the block pool of what weights and the largest step leave of a GPU."
    )
    staging_bytes: int = Field(
        0,
        ge=0,
        description="Shared memory in which blocks stop over on their way from and to other processes; 0: none on cpu, "
        "where the pool itself is shared, 128 MiB with rank_hosts and at most 512 MiB, 1 GiB on cuda.",
    )
    num_blocks: int = Field(0, ge=0, description="Blocks of the pool, going before kv_cache_bytes; 0: by size.")
    max_context: int = Field(0, ge=0, description="Most tokens of a sequence; 0: what the model allows.")
    max_adapters: int = Field(
        16, ge=0, le=1024, description="Most low-rank adapters in memory at once, on cpu; 0: it serves none."
    )
    max_adapter_rank: int = Field(64, ge=1, le=LARGEST_RANK, description="Highest rank of an adapter.")
    max_adapter_bytes: int = Field(
        2**30,
        ge=2**21,
        description="Most memory of these adapters together; one that is larger alone is refused. Those that are being "
        "read, up to 8, come on top.",
    )
    max_adapter_waiting: int = Field(
        64, ge=0, description="Most requests that wait for a place for their adapter; further ones go elsewhere."
    )
    adapter_wait_s: float = Field(
        5.0, gt=0, description="Longest wait of a request for its adapter, before it is tried elsewhere."
    )
    step_token_budget: int = Field(512, ge=16, le=65_536, description="Most tokens of one step.")
    target_step_s: float = Field(0.2, gt=0, le=10, description="Time a step should take; the budget shrinks to it.")
    max_running: int = Field(32, ge=1, le=4096, description="Most sequences that run at once.")
    speculation: Literal["ngram", "off"] = Field(
        "off", description="ngram: draft tokens by looking where the latest ones stood before."
    )
    speculation_tokens: int = Field(7, ge=1, le=64, description="Most tokens drafted of a sequence in one step.")
    speculation_rows: int = Field(
        8,
        ge=2,
        le=4096,
        description="Most rows of a step with drafts: decoding sequences and drafted tokens.",
    )
    pooling: Literal["none", "mean", "last"] = Field(
        "none", description="Serve embeddings: the mean of a prompt's hidden states, or the last one; on cpu."
    )
    max_queue_s: float = Field(0.2, ge=0, description="Prefill time that may wait beyond what can run at once.")
    max_requests: int = Field(1024, ge=1, description="Most requests open at once, waiting ones included.")
    max_kept_requests: int = Field(
        256, ge=0, description="Most requests with an idempotency key kept for callers that come back, complete or not."
    )
    prefix_cache: bool = Field(True, description="Reuse blocks of earlier requests.")
    push: Literal["write_through", "on_eviction", "off"] = Field(
        "write_through", description="When blocks are offered to a kvstore node."
    )
    max_push_blocks: int = Field(256, ge=1, description="Most blocks pinned for pushes.")
    repush_bytes_per_s: float = Field(
        64.0 * 2**20, gt=0, description="Older blocks offered to a kvstore node that has just become the target."
    )
    node_ramp_s: float = Field(
        60.0, ge=0, description="Time in which a kvstore node that has come or come back gets its share of the workers."
    )
    max_served_blocks: int = Field(1024, ge=1, description="Most blocks pinned for pulls by others.")
    max_pull_s: float = Field(5.0, gt=0, description="Longest pull before the rest is computed.")
    pull_half_life_s: float = Field(
        30.0,
        gt=0,
        description="Time in which a bad figure of a link loses half of its weight, so that it is tried again.",
    )
    default_deadline_s: float = Field(600.0, gt=0, description="Deadline of calls that bring none.")
    stream_queue: int = Field(1024, ge=1, description="Most outputs a slow reader of a stream may leave unread.")
    start_timeout_s: float = Field(300.0, gt=0, description="Longest time until the model has produced a token.")
    rank_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait of a rank for another one in a step, before the replica ends."
    )
    child_silence_s: float = Field(5.0, gt=1, description="Silence of a child process that ends the worker.")

    @field_validator("rank_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_names(value)

    @property
    def drafted_tokens(self) -> int:
        """Most tokens drafted of a sequence in one step; 0: none are."""
        return self.speculation_tokens if self.speculation == "ngram" else 0

    @property
    def is_exact(self) -> bool:
        """Whether what is drawn does not depend on the batch."""
        return self.exact == "on" or (self.exact == "auto" and self.device == "cpu")

    @property
    def num_ranks(self) -> int:
        """Processes that compute."""
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel

    @property
    def pushes_blocks(self) -> bool:
        """Whether blocks are offered to a kvstore node."""
        return self.push != "off" and self.engine != "sim"


def check_settings(settings: WorkerSettings) -> None:
    """What single fields cannot say. Raises ConfigurationError with one line."""
    _check_simulation(settings)
    if settings.device == "cpu" and settings.exact == "off":
        raise ConfigurationError(
            "worker: exact='off': on cpu results never depend on the batch, and nothing would be gained by letting them"
        )
    if settings.device == "cpu" and settings.kv_dtype not in ("auto", settings.dtype):
        raise ConfigurationError(f"worker: kv_dtype='{settings.kv_dtype}': on cpu the KV cache has dtype")
    _check_weights(settings)
    if settings.device == "cuda" and settings.max_adapters and "max_adapters" in settings.model_fields_set:
        raise ConfigurationError(f"worker: max_adapters={settings.max_adapters}: adapters are served on cpu alone")
    if settings.pooling != "none" and settings.device != "cpu":
        raise ConfigurationError(f"worker: pooling='{settings.pooling}': needs device='cpu'")
    _check_ranks(settings)
    if 0 < settings.kv_cache_bytes < 2**20:
        raise ConfigurationError(f"worker: kv_cache_bytes={settings.kv_cache_bytes}: at least 1048576, or 0")
    if settings.max_running > settings.step_token_budget:
        raise ConfigurationError(
            f"worker: max_running={settings.max_running}: above step_token_budget={settings.step_token_budget}"
        )


def _check_simulation(settings: WorkerSettings) -> None:
    given = settings.model_fields_set
    if settings.engine != "sim":
        _refuse(settings, {name for name in given if name.startswith("sim_")}, "needs engine='sim'")
        return
    _refuse(settings, given & _NOT_SIMULATED, "a simulated worker has no such thing")
    if settings.sim_calibration is not None:
        _refuse(settings, given & _TIMES, "sim_calibration says that")


def _refuse(settings: WorkerSettings, names: Set[str], reason: str) -> None:
    for name in sorted(names):
        raise ConfigurationError(f"worker: {name}={getattr(settings, name)!r}: {reason}")


def _check_ranks(settings: WorkerSettings) -> None:
    sizes = {name: getattr(settings, name) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")}
    name = next((name for name, size in sizes.items() if size > 1), "")
    if settings.rank_hosts:
        _check_rank_hosts(settings)
    if not name:
        return
    asked = f"worker: {name}={sizes[name]}"
    if settings.device != "cpu":
        raise ConfigurationError(f"{asked}: needs device='cpu', on cuda a replica is one process")
    if settings.staging_bytes and not settings.rank_hosts:
        raise ConfigurationError(f"{asked}: the ranks compute in the shared pool itself, which staging_bytes forbids")
    if settings.weight_dtype != "dtype" and settings.tensor_parallel * settings.expert_parallel > 1:
        # Scales would be those of a part of a row: another model under the same digest.
        raise ConfigurationError(f"{asked}: needs weight_dtype='dtype'; pipeline_parallel alone takes any")
    if settings.max_adapters and "max_adapters" in settings.model_fields_set:
        raise ConfigurationError(f"{asked}: max_adapters={settings.max_adapters}: adapters are served by one process")
    if settings.pooling != "none" and settings.pipeline_parallel > 1:
        raise ConfigurationError(f"{asked}: pooling='{settings.pooling}': needs pipeline_parallel=1")
    if settings.num_ranks > MOST_RANKS:
        raise ConfigurationError(f"{asked}: {settings.num_ranks} processes in all, at most {MOST_RANKS}")


def _check_rank_hosts(settings: WorkerSettings) -> None:
    asked, hosts = f"worker: rank_hosts={','.join(settings.rank_hosts)!r}", 1 + len(settings.rank_hosts)
    for address in settings.rank_hosts:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigurationError(f"{asked}: {address!r} is no HOST:PORT")
    if settings.num_ranks % hosts:
        raise ConfigurationError(
            f"{asked}: {settings.num_ranks} processes do not divide over {hosts} hosts; pipeline_parallel sets stages"
        )
    if settings.staging_bytes > MOST_SPREAD_STAGING_BYTES:
        raise ConfigurationError(f"worker: staging_bytes={settings.staging_bytes}: at most {MOST_SPREAD_STAGING_BYTES}")
    reachable_host(settings)


def _check_weights(settings: WorkerSettings) -> None:
    rounded = f"worker: weight_dtype='{settings.weight_dtype}'"
    device = {"int8-dynamic": "cpu", "float8": "cuda"}.get(settings.weight_dtype, settings.device)
    if device != settings.device:
        raise ConfigurationError(f"{rounded}: needs device='{device}'")
    if settings.weight_dtype != "dtype" and settings.dtype != "bfloat16":
        raise ConfigurationError(f"{rounded}: needs dtype='bfloat16'")
    if settings.weight_dtype == "float8" and settings.exact == "on":
        raise ConfigurationError(f"{rounded}: its products depend on the batch, which exact='on' forbids")
