"""Whole steps of an 8B-shaped Llama with random weights, as a worker runs them: captured decode, eager prefill.

The floor of a decode step is the time in which the copy bandwidth moves what it must read: the weights of all linear
layers, and the KV of its contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import torch

from bench.gpu_checks import sequences
from bench.gpu_kernels import TINY, Case, Shape
from bench.gpu_measure import Limits, Row, Timer, compute_row
from kernels.batch import BLOCK_TOKENS
from services.worker.model.config import ModelConfig, RopeConfig
from services.worker.model.device.block_copier import PoolCopier
from services.worker.model.device.device_runner import DeviceRunner
from services.worker.model.device.graphs import CudaCapture, DecodeGraphs, run_again
from services.worker.model.device.timeline import timeline
from services.worker.model.device.triton_decoder import TritonDecoder
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import DeviceWeightDtype, KvLayout
from services.worker.model.memory import MemoryMap
from services.worker.model.runner import RunnerSpec
from services.worker.model.step import StepInput
from services.worker.model.step_check import StepLimits, checked_batch
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import LayerWeights, MlpWeights, ModelWeights

DECODE_TARGET = 1.25
WEIGHT_DTYPES: tuple[DeviceWeightDtype, ...] = ("dtype", "float8", "int8", "int4")
WEIGHT_DTYPES_INTERPRETED: tuple[DeviceWeightDtype, ...] = ("dtype", "float8")
# Of the tiny model: products and residual stream round to BF16 a dozen times on the way to its logits.
MODEL_TOLERANCE = 6e-2


def model_config(shape: Shape) -> ModelConfig:
    """Of a Llama of that shape."""
    return ModelConfig(
        architecture="llama",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, shape.head_dim),
        max_positions=131072,
        tie_embeddings=False,
        attention_scale=shape.head_dim**-0.5,
    )


def random_weights(config: ModelConfig, device: torch.device) -> ModelWeights:
    """Made on the device: weights that keep activations about as large as they come."""

    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0.0, k**-0.5)

    def layer() -> LayerWeights:
        query, hidden = config.num_heads * config.head_dim, config.hidden_size
        mlp = MlpWeights(
            matrix(config.intermediate_size, hidden),
            matrix(config.intermediate_size, hidden),
            matrix(hidden, config.intermediate_size),
        )
        return LayerWeights(
            attention_norm=torch.ones(hidden, device=device),
            qkv=matrix(query + 2 * config.num_kv_heads * config.head_dim, hidden),
            qkv_bias=None,
            output=matrix(hidden, query),
            output_bias=None,
            mlp_norm=torch.ones(hidden, device=device),
            mlp=mlp,
        )

    return ModelWeights(
        embedding=matrix(config.vocab_size, config.hidden_size),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=torch.ones(config.hidden_size, device=device),
        head=matrix(config.vocab_size, config.hidden_size),
    )


def step_shapes(device: torch.device) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Decode steps as (sequences, context), most sequences last; prefill steps as tokens."""
    if device.type == "cuda":
        return ((1, 1024), (16, 1024), (64, 1024)), (2048, 8192)
    return ((1, 20), (2, 20)), (33,)


class Bench:
    """A runner of one weight format on the device."""

    def __init__(
        self, device: torch.device, shape: Shape, weight_dtype: DeviceWeightDtype, weights: ModelWeights
    ) -> None:
        self.weight_dtype = weight_dtype
        self.config = model_config(shape)
        on_gpu = device.type == "cuda"
        decodes, prefills = step_shapes(device)
        max_seqs, longest = decodes[-1]
        self._context = 8192 if on_gpu else 64
        self._layout = KvLayout(shape.kv_heads, shape.layers, shape.head_dim, "bfloat16")
        self._num_blocks = max_seqs * -(-longest // BLOCK_TOKENS) + -(-prefills[-1] // BLOCK_TOKENS)
        pool = KvPool.on_device(device, self._layout, self._num_blocks)
        decoder = TritonDecoder(self.config, weights, pool, self._context, exact=False, weight_dtype=weight_dtype)
        self.streamed_bytes = decoder.streamed_bytes
        lanes = timeline(device)
        copier = PoolCopier(pool, torch.zeros(1, self._layout.block_bytes, dtype=torch.uint8), lanes)
        self.runner = DeviceRunner(
            self._spec(), decoder, lanes, copier, DecodeGraphs(max_seqs, min(2048, self._context))
        )
        self.runner.capture(CudaCapture() if on_gpu else run_again)

    def step(self, seqs: int, tokens: int, context: int) -> StepInput:
        """`seqs` sequences that compute their last `tokens` of `context`."""
        batch = sequences([(tokens, context)] * seqs, self._num_blocks)
        return StepInput(
            batch.token_ids % self.config.vocab_size,
            batch.positions,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.logit_rows,
        )

    def run(self, step: StepInput) -> torch.Tensor:
        """To its logits on the host."""
        self.runner.submit(step)
        return self.runner.collect()

    def _spec(self) -> RunnerSpec:
        memory = MemoryMap("", 0, 0, 0, self._layout.block_bytes, self._num_blocks, self._context)
        return RunnerSpec(
            self.config,
            self._layout,
            bytes(16),
            "bfloat16",
            self.config.vocab_size,
            self._context,
            self._num_blocks,
            "random",
            "triton",
            memory,
        )


def step_cases(timer: Timer, limits: Limits, shape: Shape) -> Iterator[Case]:
    """Decode and prefill steps, host included: from submit until the logits are in host memory."""
    weights = random_weights(model_config(shape), timer.device)
    decodes, prefills = step_shapes(timer.device)
    for weight_dtype in WEIGHT_DTYPES if timer.device.type == "cuda" else WEIGHT_DTYPES_INTERPRETED:
        # Opened by the first case that runs, given back after the last.
        opened = cache(partial(Bench, timer.device, shape, weight_dtype, weights))
        for seqs, context in decodes:
            yield (
                f"step decode {weight_dtype} {seqs} x {context}",
                partial(_decode, timer, limits, opened, seqs, context),
            )
        for tokens in prefills:
            yield f"step prefill {weight_dtype} {tokens}", partial(_prefill, timer, limits, opened, tokens)
        opened.cache_clear()


def _decode(timer: Timer, limits: Limits, opened: Callable[[], Bench], seqs: int, context: int) -> Row:
    bench = opened()
    step = bench.step(seqs, 1, context)
    ms = timer.milliseconds(lambda: bench.run(step), cold=False, captured=False)
    kv_bytes = seqs * context * bench.runner.spec.layout.block_bytes / BLOCK_TOKENS
    floor_ms = 1e3 * (bench.streamed_bytes + kv_bytes) / limits.copy_bytes_per_s
    name = f"step decode {bench.weight_dtype} {seqs} x {context}"
    return Row(name, ms, f"{seqs / ms * 1e3:.0f} tokens/s", "floor", ms / floor_ms, DECODE_TARGET, at_most=True)


def _prefill(timer: Timer, limits: Limits, opened: Callable[[], Bench], tokens: int) -> Row:
    bench = opened()
    step = bench.step(1, tokens, tokens)
    ms = timer.milliseconds(lambda: bench.run(step), cold=False, captured=False)
    config = bench.config
    parameters = config.num_layers * (
        config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
        + 3 * config.hidden_size * config.intermediate_size
    )
    flop = 2.0 * parameters * tokens + 2.0 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
    row = compute_row(f"step prefill {bench.weight_dtype} {tokens}", ms, flop, limits)
    return Row(row.name, ms, f"{tokens / ms * 1e3:.0f} tokens/s", row.limit, row.ratio)


def check_model(device: torch.device) -> float:
    """A tiny model's prefill and decode on the device against the plain torch decoder on CPU."""
    config = model_config(TINY)
    torch.manual_seed(0)
    weights = random_weights(config, torch.device("cpu"))
    bench = Bench(device, TINY, "dtype", weights)
    layout = KvLayout(TINY.kv_heads, TINY.layers, TINY.head_dim, "bfloat16")
    reference = TorchDecoder(config, weights, KvPool.on_device(torch.device("cpu"), layout, 600), 64)
    worst = 0.0
    tables = np.arange(3, dtype=np.int32)[None]
    for start, end in ((0, 30), (30, 37), (37, 38)):
        step = StepInput(
            np.arange(start, end, dtype=np.int32),
            np.arange(start, end, dtype=np.int32),
            np.array([0, end - start], dtype=np.int32),
            np.array([end], dtype=np.int32),
            tables,
            np.array([end - start - 1], dtype=np.int32),
        )
        batch = checked_batch(step, StepLimits(config.vocab_size, 600, 64))
        expected = reference.forward(batch, torch.get_num_threads())
        found = bench.run(step)
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst
