"""Low-rank adapters in the decoders: equal to merged weights, and no row's result depends on another's adapter.

On the first layers of the real model: what the others add is time. bench/lora.py compares the whole model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.merged_weights import merged_layer
from bench.random_adapters import write_random_adapter
from kernels.cpu.packing import IntegerFormat
from services.common.adapter_files import PROJECTIONS
from services.worker.model.adapter import AdapterWeights, load_adapter
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.kv_pool import KvPool
from services.worker.model.load import kv_layout
from services.worker.model.model_files import open_model
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.step_check import StepLimits, checked_batch
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import LayerWeights, MlpWeights, ModelWeights, load_weights

from .steps import Chunk, make_step

NUM_LAYERS = 3
CONTEXT = 64
NUM_BLOCKS = 160
NUM_ADAPTERS = 100
# More would wait for each other on a busy machine.
THREADS = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def model(model_path: Path) -> tuple[ModelConfig, ModelWeights]:
    """The first layers, float32."""
    torch.set_num_threads(THREADS)
    opened = open_model(model_path)
    weights = load_weights(opened.read()[0], opened.config, torch.float32)
    return replace(opened.config, num_layers=NUM_LAYERS), replace(weights, layers=weights.layers[:NUM_LAYERS])


def cast(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    def layer(one: LayerWeights) -> LayerWeights:
        assert isinstance(one.mlp, MlpWeights)
        mlp = MlpWeights(one.mlp.gate.to(dtype), one.mlp.up.to(dtype), one.mlp.down.to(dtype))
        return replace(one, qkv=one.qkv.to(dtype), output=one.output.to(dtype), mlp=mlp)

    head = weights.head.to(dtype)
    return replace(weights, embedding=head, head=head, layers=tuple(map(layer, weights.layers)))


def make_decoder(
    model: tuple[ModelConfig, ModelWeights],
    dtype: str,
    slots: int,
    *,
    compiled: bool,
    integers: IntegerFormat | None = None,
) -> NativeDecoder | TorchDecoder:
    config, weights = model
    pool = KvPool.on_device(torch.device("cpu"), kv_layout(config, dtype), NUM_BLOCKS)  # type: ignore[arg-type]
    weights = cast(weights, DTYPES[dtype])
    if compiled:
        return NativeDecoder(config, weights, pool, CONTEXT, integers, slots)
    return TorchDecoder(config, weights, pool, CONTEXT, slots)


def put(decoder: Decoder, slot: int, weights: AdapterWeights) -> None:
    decoder.adapters.put(slot, decoder.adapters.prepare(weights))


def run(decoder: Decoder, chunks: Sequence[Chunk], slots: Sequence[int] | None = None) -> torch.Tensor:
    """Logits of each chunk's last token."""
    step = make_step(chunks, last_only=True)
    if slots is not None:
        step = replace(step, adapters=np.array(slots, np.int32))
    return decoder.forward(
        checked_batch(step, StepLimits(49_152, NUM_BLOCKS, CONTEXT, decoder.adapters.num_slots)), THREADS
    )


def test_a_hundred_adapters_in_one_batch_equal_merged_weights(
    model: tuple[ModelConfig, ModelWeights], tmp_path: Path
) -> None:
    """Each sequence with an adapter of its own; ranks, projections and layers differ. Float32, greedy."""
    draw, (config, weights) = random.Random(5), model
    adapters = []
    for number in range(NUM_ADAPTERS):
        folder = write_random_adapter(
            tmp_path / str(number),
            config,
            seed=number,
            rank=draw.choice((1, 2, 3, 4, 7, 8)),
            projections=draw.sample(PROJECTIONS, draw.randint(1, 7)),
            layers=sorted(draw.sample(range(NUM_LAYERS), 2)),
        )
        adapters.append(load_adapter(folder, config, torch.float32, max_rank=8))
    assert len({adapter.digest for adapter in adapters}) == NUM_ADAPTERS
    prompts = [[draw.randrange(5, 49_000) for _ in range(5)] for _ in range(NUM_ADAPTERS + 1)]
    slots = [*range(NUM_ADAPTERS), -1]
    decoder = make_decoder(model, "float32", NUM_ADAPTERS, compiled=True)
    for slot, adapter in enumerate(adapters):
        put(decoder, slot, adapter)
    first = run(decoder, [Chunk(p, 0, [seq]) for seq, p in enumerate(prompts)], slots)
    drawn = first.argmax(dim=1).tolist()
    second = run(decoder, [Chunk([token], 5, [seq]) for seq, token in enumerate(drawn)], slots)
    base = run(decoder, [Chunk(p, 0, [110 + seq]) for seq, p in enumerate(prompts[-10:])])
    assert torch.equal(base[-1], first[-1])
    assert not torch.isclose(base[:-1], first[-10:-1], atol=0.1).all(dim=1).any()
    for slot, adapter in enumerate(adapters):
        layers = tuple(map(merged_layer, weights.layers, adapter.layers))
        reference = make_decoder((config, replace(weights, layers=layers)), "float32", 0, compiled=False)
        whole = Chunk([*prompts[slot], drawn[slot]], 0, [0])
        step = replace(make_step([whole]), logit_rows=np.array([4, 5], np.int32))
        expected = reference.forward(checked_batch(step, StepLimits(49_152, NUM_BLOCKS, CONTEXT)), THREADS)
        found = torch.stack((first[slot], second[slot]))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1)), f"adapter {slot}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_do_not_depend_on_others_adapters(
    model: tuple[ModelConfig, ModelWeights], tmp_path: Path, dtype: str, compiled: bool
) -> None:
    """Alone and in a mixed batch, whole and in chunks: the same bits; beside adapters, the base's rows too."""
    config, _ = model
    prompts = [[(7 * seq + 11 * token) % 49_000 + 5 for token in range(3 + 5 * seq)] for seq in range(6)]
    slots = [0, -1, 1, 0, 2, 1]
    decoder = make_decoder(model, dtype, 3, compiled=compiled)
    for slot, projections in enumerate((PROJECTIONS, ("q", "v"), ("gate", "down"))):
        folder = write_random_adapter(tmp_path / str(slot), config, seed=slot, rank=4 + slot, projections=projections)
        put(decoder, slot, load_adapter(folder, config, DTYPES[dtype], max_rank=8))
    tables = [[10 * seq + block for block in range(3)] for seq in range(6)]
    together = run(decoder, [Chunk(p, 0, t) for p, t in zip(prompts, tables, strict=True)], slots)
    for seq, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        table = [100, 101, 102]
        assert torch.equal(run(decoder, [Chunk(prompt, 0, table)], [slot])[0], together[seq])
        run(decoder, [Chunk(prompt[:2], 0, table)], [slot])
        assert torch.equal(run(decoder, [Chunk(prompt[2:], 2, table)], [slot])[0], together[seq])
    assert torch.equal(run(decoder, [Chunk(prompts[1], 0, tables[1])])[0], together[1])


@pytest.mark.parametrize("integers", ["int8", "int4", "int8-dynamic"])
def test_rounded_weights_take_adapters(
    model: tuple[ModelConfig, ModelWeights], tmp_path: Path, integers: IntegerFormat
) -> None:
    weights = load_adapter(write_random_adapter(tmp_path, model[0], seed=1), model[0], torch.bfloat16, max_rank=8)
    decoder = make_decoder(model, "bfloat16", 1, compiled=True, integers=integers)
    put(decoder, 0, weights)
    chunks = [Chunk(list(range(100, 120)), 0, [2 * seq, 2 * seq + 1]) for seq in range(2)]
    base, adapted = run(decoder, chunks, [-1, 0])
    assert torch.equal(base, run(decoder, chunks[:1])[0])
    assert torch.equal(adapted, run(decoder, chunks[1:], [0])[0])
    assert not torch.allclose(base, adapted, atol=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiled_and_plain_torch_agree(model: tuple[ModelConfig, ModelWeights], tmp_path: Path, dtype: str) -> None:
    weights = load_adapter(write_random_adapter(tmp_path, model[0], seed=1), model[0], DTYPES[dtype], max_rank=8)
    found = []
    for compiled in (True, False):
        decoder = make_decoder(model, dtype, 1, compiled=compiled)
        put(decoder, 0, weights)
        found.append(run(decoder, [Chunk(list(range(100, 130)), 0, [0, 1])], [0]))
    torch.testing.assert_close(found[0], found[1], atol=1e-3 if dtype == "float32" else 0.5, rtol=0.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_slots_without_an_adapter_are_refused(model: tuple[ModelConfig, ModelWeights], compiled: bool) -> None:
    decoder = make_decoder(model, "bfloat16", 2, compiled=compiled)
    with pytest.raises(ValueError, match="adapters outside the 2 slots"):
        run(decoder, [Chunk([5], 0, [0])], [2])
    with pytest.raises(ValueError, match="slot 1 has no adapter"):
        run(decoder, [Chunk([5], 0, [0])], [1])
