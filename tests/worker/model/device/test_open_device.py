"""A replica opened on a device, here CPU tensors: what it says of itself, and that it serves; what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.family_models import make_model, save_model
from services.common.settings import ConfigurationError
from services.worker.chunk import MOST_ROWS_READ
from services.worker.config import WorkerSettings, check_settings
from services.worker.engine.benchmark import measure
from services.worker.engine.config import EngineConfig
from services.worker.engine.gpu import DeviceUnavailable, cuda_device
from services.worker.engine.limits import most_logit_rows
from services.worker.engine.open import open_replica
from services.worker.engine.open_cuda import open_device
from services.worker.engine_messages import LoadProgress
from services.worker.staging import StagedTransfers

CPU = torch.device("cpu")


def engine_config(folder: Path, pool_fd: int, **changes: object) -> EngineConfig:
    fields: dict[str, object] = {
        "parent_pid": 0,
        "instance": "test",
        "log_level": "INFO",
        "front_fd": -1,
        "mover_fd": -1,
        "pool_fd": pool_fd,
        "model_path": str(folder),
        "dtype": "float32",
        "weight_dtype": "dtype",
        "threads": 1,
        "device": "cuda",
        "exact": "off",
        "kv_dtype": "auto",
        "kv_cache_bytes": 0,
        "kv_cache_fraction": 0.9,
        "staging_bytes": 2**20,
        "num_blocks": 8,
        "max_context": 96,
        "max_adapters": 4,
        "max_adapter_rank": 8,
        "max_adapter_bytes": 2**30,
        "max_adapter_waiting": 4,
        "adapter_wait_s": 1.0,
        "step_token_budget": 32,
        "target_step_s": 0.2,
        "max_running": 2,
        "speculation_tokens": 0,
        "speculation_rows": 9,
        "pooling": "none",
        "max_queue_s": 0.2,
        "prefix_cache": True,
        "max_pull_s": 1.0,
        "pull_half_life_s": 30.0,
        "push_policy": "write_through",
        "max_push_blocks": 8,
        "repush_bytes_per_s": 1e6,
        "max_served_blocks": 8,
    }
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def pool_fd() -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def test_a_replica_on_a_device_serves_and_tells_its_memory(tmp_path: Path, pool_fd: int) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    told: list[LoadProgress] = []
    opened = open_device(engine_config(folder, pool_fd, kv_dtype="int8"), CPU, told.append)
    assert told[-1].done_bytes == told[-1].total_bytes > 0
    spec = opened.runner.spec
    block = spec.layout.block_bytes
    # 2 heads, 3 layers, k and v, 16 tokens of 16 bytes and a scale of 4.
    assert block == 2 * 3 * 2 * 16 * (16 + 4)
    assert opened.transfer_slots == 2**20 // block
    assert os.fstat(pool_fd).st_size == opened.transfer_slots * block
    assert (spec.num_blocks, spec.layout.dtype, spec.dtype, spec.max_context) == (8, "int8", "float32", 96)
    assert (spec.memory.staging_bytes, spec.memory.num_blocks) == (opened.transfer_slots * block, 8)
    assert isinstance(opened.transfers, StagedTransfers)
    speed = measure(opened.runner, num_blocks=8, max_context=96, vocab_size=spec.vocab_size)
    assert speed.prefill_tokens_per_s > 0


def test_rows_of_logits_of_the_largest_step(tmp_path: Path) -> None:
    def rows(**changes: int) -> int:
        return most_logit_rows(engine_config(tmp_path, -1, max_running=200, **changes))

    assert rows() == rows(speculation_rows=500) == 200 + MOST_ROWS_READ
    assert rows(speculation_tokens=7, speculation_rows=8) == 200 + MOST_ROWS_READ
    assert rows(speculation_tokens=7, speculation_rows=500) == 500


def test_a_device_that_is_not_there_is_one_clear_line(tmp_path: Path, pool_fd: int) -> None:
    if torch.cuda.is_available():
        assert cuda_device().type == "cuda"
        return
    with pytest.raises(DeviceUnavailable, match=r"device='cuda': (torch .* is built without CUDA|no GPU)"):
        open_replica(engine_config(tmp_path, pool_fd), 1, print)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact": "off"}, "exact='off': on cpu results never depend on the batch"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8': on cpu the KV cache has dtype"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes=1000: at least"),
        ({"weight_dtype": "float8"}, "weight_dtype='float8': needs device='cuda'"),
        ({"weight_dtype": "int8-dynamic", "device": "cuda"}, "weight_dtype='int8-dynamic': needs device='cpu'"),
        ({"weight_dtype": "int4", "device": "cuda", "dtype": "float32"}, "weight_dtype='int4': needs dtype='bfloat16'"),
        ({"weight_dtype": "float8", "device": "cuda", "exact": "on"}, "weight_dtype='float8': its products depend"),
    ],
)
def test_settings_that_a_device_cannot_have(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_settings(WorkerSettings(**changes))  # type: ignore[arg-type]
    check_settings(WorkerSettings(device="cuda", exact="off", kv_dtype="int8", weight_dtype="float8"))


@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "float8"])
def test_rounded_weights_are_another_model_and_say_so(tmp_path: Path, pool_fd: int, weight_dtype: str) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    opened = [
        open_device(engine_config(folder, pool_fd, dtype="bfloat16", weight_dtype=name), CPU, lambda _: None)
        for name in ("dtype", weight_dtype)
    ]
    plain, rounded = (replica.runner.spec for replica in opened)
    assert plain.digest != rounded.digest
    assert rounded.weight_format == f"{plain.weight_format} as {weight_dtype}"
    assert measure(opened[1].runner, num_blocks=8, max_context=96, vocab_size=rounded.vocab_size).decode_step_s > 0


def test_a_pool_into_which_no_block_fits_is_refused(tmp_path: Path, pool_fd: int) -> None:
    folder = save_model(make_model("llama3"), tmp_path)
    with pytest.raises(ValueError, match="no block of"):
        open_device(engine_config(folder, pool_fd, num_blocks=0, kv_cache_bytes=100), CPU, print)
    with pytest.raises(ValueError, match="kv_dtype=bfloat16: with dtype=float32"):
        open_device(engine_config(folder, pool_fd, kv_dtype="bfloat16"), CPU, print)
