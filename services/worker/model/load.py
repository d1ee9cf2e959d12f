"""From a path to a runner: read the configuration and weights, pick the arithmetic, view the pool.

A path is a Hugging Face folder (config.json and safetensors) or a GGUF file. Whoever makes the pool first asks
`open_model` (model_files.py) and `kv_layout` how large a block is; neither reads weights.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import structlog

from kernels.cpu.build import BuildError
from kernels.cpu.packing import IntegerFormat
from services.common.artifacts.chunk_reader import Progress
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.digest import model_digest
from services.worker.model.errors import UnsupportedModel
from services.worker.model.kv_pool import TORCH_DTYPES, KvPool, PoolBuffer
from services.worker.model.layout import KV_DTYPE_BYTES, ComputeDtype, CpuWeightDtype, KvDtype, KvLayout, WeightDtype
from services.worker.model.memory import MemoryMap, step_bytes
from services.worker.model.model_files import open_model
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.rank_loading import Ranks, load_part, read_part
from services.worker.model.runner import CpuRunner, RunnerSpec
from services.worker.model.seam import Seam
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import ModelWeights, load_weights, weight_bytes

log = structlog.get_logger(__name__)


def kv_layout(config: ModelConfig, dtype: KvDtype) -> KvLayout:
    """The pool layout of a model; KV has the compute dtype."""
    return KvLayout(config.num_kv_heads, config.num_layers, config.head_dim, dtype)


def pool_layout(layout: KvLayout, ranks: Ranks) -> KvLayout:
    """Of the pool that a rank computes in: of whole blocks, or of its part of them in a spread group."""
    if not ranks.is_spread:
        return layout
    return replace(layout, num_kv_heads=len(ranks.shard.kv_heads), num_layers=len(ranks.shard.layers))


def load_runner(
    path: Path,
    *,
    dtype: ComputeDtype = "bfloat16",
    weight_dtype: CpuWeightDtype = "dtype",
    pool_buffer: PoolBuffer,
    num_threads: int | None = None,
    served_context: int | None = None,
    compiled: bool = True,
    max_step_tokens: int = 512,
    staging_bytes: int = 0,
    adapter_slots: int = 0,
    adapter_bytes: int = 0,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> CpuRunner:
    """Load a model over a pool that the caller owns.

    dtype: of weights, activations and KV. weight_dtype: what the weights of linear layers are rounded to ("dtype": as
    they are computed with); whole numbers need bfloat16 and the compiled kernels. pool_buffer: writable, kept alive by
    the runner. num_threads: None follows torch. served_context: tokens, at most the model's own maximum, which is the
    default. compiled: use the compiled kernels where they can be had. max_step_tokens (of the largest step),
    staging_bytes, adapter_bytes: for the memory map. adapter_slots: adapters that can be resident. progress: told the
    bytes read, from any thread. ranks: the group of which this process has a part; all its ranks call alike, without
    adapters, over one pool or, in a spread group, each over one that has its heads and layers alone. Raises
    UnsupportedModel, InvalidWeights, or ValueError for the pool.
    """
    model = open_model(path)
    config = model.config
    context = config.max_positions if served_context is None else served_context
    if not 0 < context <= config.max_positions:
        raise UnsupportedModel(f"served context {context}: the model has 1 to {config.max_positions} positions")
    layout = kv_layout(config, dtype)
    pool = KvPool.from_buffer(pool_buffer, layout if ranks is None else pool_layout(layout, ranks))
    if ranks is None:
        source, weights_digest = model.read(progress=progress)
        weights = load_weights(source, config, TORCH_DTYPES[dtype])
    else:
        source, weights_digest = read_part(model, ranks, progress)
        weights = load_part(source, ranks.shard, dtype)
    # What has been converted need not stay beside the result.
    del source
    decoder = _decoder(config, weights, pool, context, weight_dtype, compiled, adapter_slots, ranks)
    held_bytes = decoder.weight_bytes if isinstance(decoder, NativeDecoder) else weight_bytes(weights)
    spec = RunnerSpec(
        config=config,
        layout=layout,
        digest=model_digest(
            config, weights=weights_digest, dtype=dtype, served_context=context, weight_dtype=weight_dtype
        ),
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_context=context,
        num_blocks=pool.num_blocks,
        weight_format=executed_format(model.weight_format, weight_dtype),
        backend=decoder.backend if ranks is None else decoder.backend + ranks.shard.parallelism.arithmetic,
        memory=_memory_map(config, held_bytes, pool, context, max_step_tokens, staging_bytes, adapter_bytes),
    )
    executed = {"backend": spec.backend, "dtype": dtype, "weights": spec.weight_format}
    log.info("model loaded", **executed, context=context, blocks=spec.num_blocks)
    return CpuRunner(spec, decoder, num_threads)


def _memory_map(
    config: ModelConfig,
    held_bytes: int,
    pool: KvPool,
    context: int,
    tokens: int,
    staging_bytes: int,
    adapter_bytes: int,
) -> MemoryMap:
    return MemoryMap(
        device="cpu",
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        weight_bytes=held_bytes,
        reserve_bytes=step_bytes(
            config, tokens=tokens, logit_rows=tokens, element_bytes=KV_DTYPE_BYTES[pool.layout.dtype]
        ),
        block_bytes=pool.layout.block_bytes,
        num_blocks=pool.num_blocks,
        max_context=context,
        staging_bytes=staging_bytes,
        adapter_bytes=adapter_bytes,
    )


def executed_format(file_format: str, weight_dtype: WeightDtype) -> str:
    """How weights are stored and, where they are rounded further, how they are executed: "safetensors as int8"."""
    return file_format if weight_dtype == "dtype" else f"{file_format} as {weight_dtype}"


def _decoder(
    config: ModelConfig,
    weights: ModelWeights,
    pool: KvPool,
    context: int,
    weight_dtype: CpuWeightDtype,
    compiled: bool,
    adapter_slots: int,
    ranks: Ranks | None,
) -> Decoder:
    if ranks is not None:
        config = ranks.shard.config
        pool = pool if ranks.is_spread else pool.part(ranks.shard.kv_heads, ranks.shard.layers)
    if weight_dtype != "dtype":
        return _integer_decoder(config, weights, pool, context, weight_dtype, adapter_slots, ranks)
    if compiled:
        try:
            return NativeDecoder(config, weights, pool, context, adapter_slots=adapter_slots, seam=ranks)
        except (BuildError, OSError) as error:
            log.warning("compiled kernels unavailable, falling back to plain torch", reason=str(error))
    return TorchDecoder(config, weights, pool, context, adapter_slots, ranks)


def _integer_decoder(
    config: ModelConfig,
    weights: ModelWeights,
    pool: KvPool,
    context: int,
    integers: IntegerFormat,
    slots: int,
    seam: Seam | None,
) -> NativeDecoder:
    """There is no fallback: plain torch would compute something else under the same digest."""
    if pool.layout.dtype != "bfloat16":
        raise UnsupportedModel(f"weight_dtype = {integers}: needs dtype bfloat16, not {pool.layout.dtype}")
    try:
        return NativeDecoder(config, weights, pool, context, integers, slots, seam)
    except (BuildError, OSError) as error:
        raise UnsupportedModel(f"weight_dtype = {integers}: needs the compiled kernels: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"weight_dtype = {integers}: {error}") from error
