"""What the front tells the engine in its command line."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.worker.admission import Pooling
from services.worker.model.layout import ComputeDtype, KvDtype, WeightDtype


class SpreadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a group whose ranks are on several hosts: the address of the store in which they find each other, "host:port",
    which rank 0 has; and the host that the others reach this rank at.
    """

    store_address: str
    own_host: str


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of an engine in a group. Ranks by kind of parallelism; its own number.

    link_fds: on rank 0 the links to the others in their order, on these the one to rank 0. store_fd: an empty file in
    which the ranks find each other; of a spread group the socket that its store listens on, no descriptor on ranks
    other than 0. spread: None where all ranks are on one host, in whose shared pool they compute; otherwise each has a
    pool of its own part, and pool_fd is rank 0's staging area. load_timeout_s, step_timeout_s: of whatever one waits
    for from another while they load, and in a step.
    """

    tensor: int
    pipeline: int
    expert: int
    rank: int
    link_fds: tuple[int, ...]
    store_fd: int
    load_timeout_s: float
    step_timeout_s: float
    spread: SpreadConfig | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but the block key, which comes as a message. Fds are inherited and named by number.

    kv_cache_bytes: size of the pool; num_blocks, where it is not 0, goes before it; what 0 means, here and for
    staging_bytes, WorkerSettings says. speculation_tokens 0: nothing is drafted. max_context 0: the model's own.
    threads 0: as many as there are cores. ranks: None of an engine that is alone; mover_fd is no descriptor on ranks
    other than 0, nor is pool_fd on those of a spread group.
    """

    parent_pid: int
    instance: str
    log_level: str
    front_fd: int
    mover_fd: int
    pool_fd: int
    model_path: str
    dtype: ComputeDtype
    weight_dtype: WeightDtype
    threads: int
    device: Literal["cpu", "cuda"]
    exact: Literal["auto", "on", "off"]
    kv_dtype: Literal["auto", KvDtype]
    kv_cache_bytes: int
    kv_cache_fraction: float
    staging_bytes: int
    num_blocks: int
    max_context: int
    max_adapters: int
    max_adapter_rank: int
    max_adapter_bytes: int
    max_adapter_waiting: int
    adapter_wait_s: float
    step_token_budget: int
    target_step_s: float
    max_running: int
    speculation_tokens: int
    speculation_rows: int
    pooling: Pooling
    max_queue_s: float
    prefix_cache: bool
    max_pull_s: float
    pull_half_life_s: float
    push_policy: Literal["write_through", "on_eviction"]
    max_push_blocks: int
    repush_bytes_per_s: float
    max_served_blocks: int
    ranks: RankConfig | None = None
