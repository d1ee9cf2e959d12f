"""A replica on a GPU: load, measure the largest step, size the pool by what is left, stage transfers, capture decode.

Imported only where there is a GPU: it needs Triton, which is not installed everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch

from kernels.batch import BLOCK_TOKENS, PagedBatch
from services.worker.engine.config import EngineConfig
from services.worker.engine.limits import most_logit_rows
from services.worker.engine.load_progress import ProgressTeller
from services.worker.engine.open import DEFAULT_STAGING_BYTES, OpenReplica, map_staging
from services.worker.engine_messages import LoadProgress
from services.worker.model.config import ModelConfig
from services.worker.model.device.block_copier import PoolCopier
from services.worker.model.device.device_memory import DeviceMemory, pin_memory
from services.worker.model.device.device_runner import DeviceRunner
from services.worker.model.device.graphs import Capture, CudaCapture, DecodeGraphs, run_again
from services.worker.model.device.timeline import timeline
from services.worker.model.device.triton_decoder import TritonDecoder
from services.worker.model.digest import model_digest
from services.worker.model.kv_pool import TORCH_DTYPES, KvPool
from services.worker.model.layout import DeviceWeightDtype, KvDtype, KvLayout
from services.worker.model.load import executed_format
from services.worker.model.memory import MemoryMap, pool_blocks
from services.worker.model.model_files import open_model
from services.worker.model.runner import RunnerSpec
from services.worker.model.step import StepInput
from services.worker.model.weights import load_weights
from services.worker.staging import StagedTransfers

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Loaded:
    """A model on the device, over a pool just large enough for the largest step."""

    decoder: TritonDecoder
    config: ModelConfig
    layout: KvLayout
    digest: bytes
    weight_format: str
    weight_bytes: int
    max_context: int


def open_device(config: EngineConfig, device: torch.device, tell: Callable[[LoadProgress], None]) -> OpenReplica:
    """Load a model to a device. tell: how far that is. Raises ModelError or ValueError with one line."""
    memory = DeviceMemory(device)
    loaded = _load(config, device, memory, tell)
    reserve_bytes = _measure_step(loaded, config, memory)
    free_bytes, total_bytes = memory.free_and_total()
    num_blocks = _num_blocks(config, loaded.layout, free_bytes, reserve_bytes)
    pool = KvPool.on_device(device, loaded.layout, num_blocks)
    loaded.decoder.use_pool(pool)
    staging = map_staging(config.pool_fd, loaded.layout, config.staging_bytes or DEFAULT_STAGING_BYTES)
    pin_memory(staging, device)
    lanes = timeline(device)
    copier = PoolCopier(pool, staging, lanes)
    memory_map = MemoryMap(
        device=memory.name,
        total_bytes=total_bytes,
        weight_bytes=loaded.weight_bytes,
        reserve_bytes=reserve_bytes,
        block_bytes=loaded.layout.block_bytes,
        num_blocks=num_blocks,
        max_context=loaded.max_context,
        staging_bytes=staging.nbytes,
    )
    spec = _spec(loaded, config, memory_map)
    reach = min(loaded.max_context, num_blocks * BLOCK_TOKENS)
    runner = DeviceRunner(spec, loaded.decoder, lanes, copier, DecodeGraphs(config.max_running, reach))
    runner.capture(_capture(device))
    # Weights, tables and the empty pool were made on a stream that steps do not wait for.
    memory.settle()
    _warm_up(runner, reach)
    _log.info("model loaded", backend=spec.backend, dtype=config.dtype, blocks=num_blocks, reserve_bytes=reserve_bytes)
    return OpenReplica(runner, StagedTransfers(copier, len(staging)), len(staging))


def _load(
    config: EngineConfig, device: torch.device, memory: DeviceMemory, tell: Callable[[LoadProgress], None]
) -> _Loaded:
    files = open_model(Path(config.model_path))
    model = files.config
    max_context = min(config.max_context or model.max_positions, model.max_positions)
    kv_dtype: KvDtype = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    if kv_dtype not in (config.dtype, "float8_e4m3fn", "int8"):
        raise ValueError(f"kv_dtype={kv_dtype}: with dtype={config.dtype} it is that, float8_e4m3fn or int8")
    layout = KvLayout(model.num_kv_heads, model.num_layers, model.head_dim, kv_dtype)
    source, weights_digest = files.read(progress=ProgressTeller(files.size, tell).add, pinned=device.type == "cuda")
    weights = load_weights(source, model, TORCH_DTYPES[config.dtype])
    del source
    step_blocks = -(-min(config.step_token_budget, max_context) // BLOCK_TOKENS)
    pool = KvPool.on_device(device, layout, step_blocks)
    before = memory.allocated()
    weight_dtype = _weight_dtype(config)
    decoder = TritonDecoder(model, weights, pool, max_context, exact=config.exact == "on", weight_dtype=weight_dtype)
    return _Loaded(
        decoder,
        model,
        layout,
        model_digest(
            model,
            weights=weights_digest,
            dtype=config.dtype,
            served_context=max_context,
            # Groups and the layers that are rounded are not those of the CPU's formats.
            weight_dtype=weight_dtype if weight_dtype == "dtype" else f"{weight_dtype} on a device",
        ),
        executed_format(files.weight_format, weight_dtype),
        memory.allocated() - before,
        max_context,
    )


def _weight_dtype(config: EngineConfig) -> DeviceWeightDtype:
    if config.weight_dtype == "int8-dynamic":
        raise ValueError("weight_dtype=int8-dynamic: is for device cpu")
    return config.weight_dtype


def _spec(loaded: _Loaded, config: EngineConfig, memory: MemoryMap) -> RunnerSpec:
    return RunnerSpec(
        config=loaded.config,
        layout=loaded.layout,
        digest=loaded.digest,
        dtype=config.dtype,
        vocab_size=loaded.config.vocab_size,
        max_context=loaded.max_context,
        num_blocks=memory.num_blocks,
        weight_format=loaded.weight_format,
        backend=loaded.decoder.backend,
        memory=memory,
    )


def _measure_step(loaded: _Loaded, config: EngineConfig, memory: DeviceMemory) -> int:
    """What the largest step takes beside weights and pool: one prompt of so many tokens, all rows of logits."""
    tokens = min(config.step_token_budget, loaded.max_context)
    positions = np.arange(tokens, dtype=np.int32)
    batch = PagedBatch(
        token_ids=np.zeros(tokens, dtype=np.int32),
        positions=positions,
        query_starts=np.array([0, tokens], dtype=np.int32),
        context_lens=np.array([tokens], dtype=np.int32),
        block_tables=np.arange(-(-tokens // BLOCK_TOKENS), dtype=np.int32)[None],
        logit_rows=positions[-most_logit_rows(config) :],
    )
    before = memory.allocated()
    memory.begin_peak()
    loaded.decoder.forward(batch, 1)
    return max(0, memory.peak() - before)


def _warm_up(runner: DeviceRunner, reach: int) -> None:
    """A step of a chunk beside a decode: its kernels are compiled now and not while somebody waits."""
    chunk = max(1, min(40, reach - 1, (runner.spec.num_blocks - 1) * BLOCK_TOKENS))
    width = -(-chunk // BLOCK_TOKENS)
    tables = np.full((2, width), -1, dtype=np.int32)
    tables[0, 0], tables[1] = width, np.arange(width)
    if runner.spec.num_blocks <= width:
        return
    runner.submit(
        StepInput(
            token_ids=np.zeros(chunk + 1, dtype=np.int32),
            positions=np.concatenate(([0], np.arange(chunk))).astype(np.int32),
            query_starts=np.array([0, 1, chunk + 1], dtype=np.int32),
            context_lens=np.array([1, chunk], dtype=np.int32),
            block_tables=tables,
            logit_rows=np.array([0, chunk], dtype=np.int32),
        )
    )
    runner.collect()


def _num_blocks(config: EngineConfig, layout: KvLayout, free_bytes: int, reserve_bytes: int) -> int:
    """Blocks of the pool: as told, or a share of what is left. Raises ValueError when not one fits."""
    if config.num_blocks:
        return config.num_blocks
    if config.kv_cache_bytes:
        blocks = layout.num_blocks(config.kv_cache_bytes)
    else:
        fraction = config.kv_cache_fraction
        blocks = pool_blocks(layout, free_bytes=free_bytes, reserve_bytes=reserve_bytes, fraction=fraction)
    if blocks < 1:
        raise ValueError(f"no block of {layout.block_bytes} bytes fits: {free_bytes} free, {reserve_bytes} for steps")
    return blocks


def _capture(device: torch.device) -> Capture:
    return CudaCapture() if device.type == "cuda" else run_again
