"""From a path to a runner: read the configuration and weights, pick the arithmetic, view the pool.

A path is a Hugging Face folder (config.json and safetensors) or a GGUF file. Whoever makes the pool first asks
`open_model` and `kv_layout` how large a block is; neither reads weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from kernels.cpu.build import BuildError
from kernels.cpu.packing import IntegerFormat
from services.common.artifacts.chunk_reader import Progress
from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.manifest import file_size, read_manifest
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.digest import model_digest
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.gguf_config import parse_gguf_config
from services.worker.model.gguf_file import read_gguf
from services.worker.model.gguf_source import GgufSource
from services.worker.model.hf_config import read_hf_config
from services.worker.model.kv_pool import TORCH_DTYPES, KvPool, PoolBuffer
from services.worker.model.layout import KV_DTYPE_BYTES, ComputeDtype, CpuWeightDtype, KvDtype, KvLayout, WeightDtype
from services.worker.model.memory import MemoryMap, step_bytes
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.reading import Extent, WeightFile, read_weights
from services.worker.model.runner import CpuRunner, RunnerSpec
from services.worker.model.safetensors_source import SafetensorsFolder, SafetensorsSource
from services.worker.model.text_part import TextPart
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import ModelWeights, TensorSource, load_weights, weight_bytes

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """An opened model: its configuration, its weight files, and how to view them once they are in memory."""

    config: ModelConfig
    path: Path
    files: list[WeightFile]
    weight_format: str
    view: Callable[[Mapping[str, torch.Tensor]], TensorSource]

    def read(self, *, progress: Progress | None = None, pinned: bool = False) -> tuple[TensorSource, bytes]:
        """Its tensors, in memory, and the digest of its weights: one pass over the files.

        A manifest beside the model is obeyed. pinned: memory that a GPU copies from. progress: told the bytes read.
        Raises InvalidWeights.
        """
        started_s = time.perf_counter()
        try:
            manifest = read_manifest(self.path)
        except InvalidArtifact as error:
            raise InvalidWeights(str(error)) from None
        loaded = read_weights(self.files, manifest, progress=progress, pinned=pinned)
        took_s = time.perf_counter() - started_s
        rate = round(loaded.size / max(took_s, 1e-9) / 1e9, 2)
        log.info(
            "weights read", bytes=loaded.size, seconds=round(took_s, 2), gb_per_s=rate, sealed=manifest is not None
        )
        return self.view(loaded.tensors), loaded.digest

    @property
    def size(self) -> int:
        """Bytes of the weight files."""
        return sum(file_size(file.path) for file in self.files)


def open_model(path: Path) -> ModelFiles:
    """Open a folder or a GGUF file without reading weights. Raises UnsupportedModel or InvalidWeights."""
    if path.is_dir():
        config, folder = read_hf_config(path), SafetensorsFolder(path)

        def view_text(data: Mapping[str, torch.Tensor]) -> TensorSource:
            return TextPart(SafetensorsSource(folder, data))

        return ModelFiles(config, path, folder.files, "safetensors", view_text)
    if not path.is_file():
        raise InvalidWeights(f"{path.name}: no such model folder or GGUF file")
    file = read_gguf(path)
    config = parse_gguf_config(file)
    extents = tuple(Extent(one.name, one.offset, one.data.nbytes) for one in file.tensors.values())

    def view(data: Mapping[str, torch.Tensor]) -> TensorSource:
        return GgufSource(file.in_memory({name: tensor.numpy() for name, tensor in data.items()}), config)

    return ModelFiles(config, path, [WeightFile(path, extents)], file.weight_format, view)


def kv_layout(config: ModelConfig, dtype: KvDtype) -> KvLayout:
    """The pool layout of a model; KV has the compute dtype."""
    return KvLayout(config.num_kv_heads, config.num_layers, config.head_dim, dtype)


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
    progress: Progress | None = None,
) -> CpuRunner:
    """Load a model over a pool that the caller owns.

    dtype: of weights, activations and KV. weight_dtype: what the weights of linear layers are rounded to ("dtype": as
    they are computed with); whole numbers need bfloat16 and the compiled kernels. pool_buffer: writable, kept alive by
    the runner. num_threads: None follows torch. served_context: tokens, at most the model's own maximum, which is the
    default. compiled: use the compiled kernels where they can be had. max_step_tokens (of the largest step),
    staging_bytes: for the memory map. adapter_slots: adapters that can be resident. progress: told the bytes read, from
    any thread. Raises UnsupportedModel, InvalidWeights, or ValueError for the pool.
    """
    model = open_model(path)
    config = model.config
    context = config.max_positions if served_context is None else served_context
    if not 0 < context <= config.max_positions:
        raise UnsupportedModel(f"served context {context}: the model has 1 to {config.max_positions} positions")
    pool = KvPool.from_buffer(pool_buffer, kv_layout(config, dtype))
    source, weights_digest = model.read(progress=progress)
    weights = load_weights(source, config, TORCH_DTYPES[dtype])
    # What has been converted need not stay beside the result.
    del source
    decoder = _decoder(config, weights, pool, context, weight_dtype, compiled, adapter_slots)
    held_bytes = decoder.weight_bytes if isinstance(decoder, NativeDecoder) else weight_bytes(weights)
    spec = RunnerSpec(
        config=config,
        layout=pool.layout,
        digest=model_digest(
            config, weights=weights_digest, dtype=dtype, served_context=context, weight_dtype=weight_dtype
        ),
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_context=context,
        num_blocks=pool.num_blocks,
        weight_format=executed_format(model.weight_format, weight_dtype),
        backend=decoder.backend,
        memory=_memory_map(config, held_bytes, pool, context, max_step_tokens, staging_bytes),
    )
    executed = {"backend": spec.backend, "dtype": dtype, "weights": spec.weight_format}
    log.info("model loaded", **executed, context=context, blocks=spec.num_blocks)
    return CpuRunner(spec, decoder, num_threads)


def _memory_map(
    config: ModelConfig, held_bytes: int, pool: KvPool, context: int, tokens: int, staging_bytes: int
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
) -> Decoder:
    if weight_dtype != "dtype":
        return _integer_decoder(config, weights, pool, context, weight_dtype, adapter_slots)
    if compiled:
        try:
            return NativeDecoder(config, weights, pool, context, adapter_slots=adapter_slots)
        except (BuildError, OSError) as error:
            log.warning("compiled kernels unavailable, falling back to plain torch", reason=str(error))
    return TorchDecoder(config, weights, pool, context, adapter_slots)


def _integer_decoder(
    config: ModelConfig, weights: ModelWeights, pool: KvPool, context: int, integers: IntegerFormat, slots: int
) -> NativeDecoder:
    """There is no fallback: plain torch would compute something else under the same digest."""
    if pool.layout.dtype != "bfloat16":
        raise UnsupportedModel(f"weight_dtype = {integers}: needs dtype bfloat16, not {pool.layout.dtype}")
    try:
        return NativeDecoder(config, weights, pool, context, integers, slots)
    except (BuildError, OSError) as error:
        raise UnsupportedModel(f"weight_dtype = {integers}: needs the compiled kernels: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"weight_dtype = {integers}: {error}") from error
