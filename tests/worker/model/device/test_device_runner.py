"""The device's runner on CPU tensors: captured shapes, padding, and what comes into the pool between steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.model.config import ModelConfig
from services.worker.model.device.block_copier import PoolCopier, adjoining
from services.worker.model.device.device_runner import DeviceRunner
from services.worker.model.device.graphs import DecodeGraphs, batch_sizes, context_lengths, run_again, smallest
from services.worker.model.device.timeline import CpuTimeline
from services.worker.model.device.triton_decoder import TritonDecoder
from services.worker.model.kv_pool import KvPool
from services.worker.model.layout import KvDtype
from services.worker.model.memory import MemoryMap
from services.worker.model.runner import RunnerSpec
from tests.worker.model.steps import Chunk, make_step

from .models import CONTEXT, NUM_BLOCKS, load, make_pool
from .test_triton_decoder import errors

TOKENS = np.random.default_rng(6).integers(3, 120, 40).tolist()
TABLES = [[1, 2, 3], [4, 5], [6], [7]]


class Counted(TritonDecoder):
    """Counts the launches of steps by their number of tokens."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.sizes: list[int] = []

    def run(self, batch: object) -> torch.Tensor:
        self.sizes.append(batch.num_tokens)  # type: ignore[attr-defined]
        return super().run(batch)  # type: ignore[arg-type]


def make_runner(
    config: ModelConfig, weights: object, pool: KvPool, *, max_seqs: int, exact: bool = True
) -> tuple[DeviceRunner, Counted, PoolCopier]:
    decoder = Counted(config, weights, pool, CONTEXT, exact=exact)
    timeline = CpuTimeline()
    staging = torch.zeros(6, pool.layout.block_bytes, dtype=torch.uint8)
    copier = PoolCopier(pool, staging, timeline, buffer_bytes=2 * pool.layout.block_bytes)
    memory = MemoryMap("cpu", 0, 0, 0, pool.layout.block_bytes, NUM_BLOCKS, CONTEXT)
    spec = RunnerSpec(config, pool.layout, b"d" * 16, "float32", 128, CONTEXT, NUM_BLOCKS, "test", "test", memory)
    runner = DeviceRunner(spec, decoder, timeline, copier, DecodeGraphs(max_seqs, CONTEXT))
    runner.capture(run_again)
    return runner, decoder, copier


def run(runner: DeviceRunner, *chunks: Chunk) -> torch.Tensor:
    runner.submit(make_step(chunks, last_only=True))
    return runner.collect().clone()


def test_decode_steps_run_captured_and_padded_with_the_same_bits(tmp_path: Path) -> None:
    config, weights = load("llama3", tmp_path, "float32")
    runner, decoder, _ = make_runner(config, weights, make_pool(config, "float32"), max_seqs=4)
    assert decoder.sizes == [4, 2, 1]
    prompts = [TOKENS[:18], TOKENS[3:8], TOKENS[5:7], TOKENS[30:31]]
    run(runner, *(Chunk(prompt, 0, table) for prompt, table in zip(prompts, TABLES, strict=True)))
    steps = [Chunk([9], len(prompt), table) for prompt, table in zip(prompts, TABLES, strict=True)]
    decoder.sizes.clear()
    together = run(runner, *steps[:3])
    alone = [run(runner, step) for step in steps[:3]]
    assert decoder.sizes == [4, 1, 1, 1]
    # The next step reads what each of them wrote: padding wrote nothing over it.
    assert torch.equal(torch.cat(alone), together)
    mixed = run(runner, steps[0], Chunk(TOKENS[:2], 0, [9]))
    assert decoder.sizes[-1] == 3
    assert torch.equal(mixed[:1], together[:1])


def test_one_step_at_a_time(tmp_path: Path) -> None:
    config, weights = load("llama3", tmp_path, "float32")
    runner, _, _ = make_runner(config, weights, make_pool(config, "float32"), max_seqs=1)
    with pytest.raises(RuntimeError, match="no step"):
        runner.collect()
    step = make_step([Chunk(TOKENS[:3], 0, [1])])
    runner.submit(step)
    with pytest.raises(RuntimeError, match="in flight"):
        runner.submit(step)
    first = runner.collect()
    kept = first.clone()
    runner.submit(step)
    assert torch.equal(runner.collect(), kept)
    assert torch.equal(first, kept)
    with pytest.raises(ValueError, match="128 served"):
        runner.submit(make_step([Chunk(TOKENS[:3], 200, [1])]))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_blocks_survive_the_way_through_staging(dtype: KvDtype, tmp_path: Path) -> None:
    """A prefix leaves one slot and comes back in another: what follows it is computed alike."""
    config, weights = load("llama3", tmp_path, "float32")
    runner, _, copier = make_runner(config, weights, make_pool(config, dtype), max_seqs=1)
    run(runner, Chunk(TOKENS[:32], 0, [1, 2]))
    expected = run(runner, Chunk(TOKENS[32:34], 32, [1, 2, 3]))
    assert copier.gather([1, 2, 1], [4, 0, 5]).is_done()
    copier.scatter([4, 0, 5], [20, 11, 12]).wait()
    assert torch.equal(run(runner, Chunk(TOKENS[32:34], 32, [20, 11, 13])), expected)
    assert torch.equal(run(runner, Chunk(TOKENS[32:34], 32, [12, 11, 14])), expected)
    wrong = run(runner, Chunk(TOKENS[32:34], 32, [11, 11, 13]))
    assert errors(wrong, expected).max() > 1e-3


@given(most=st.integers(1, 4096), wanted=st.integers(1, 4096))
def test_captured_sizes_pad_little(most: int, wanted: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 40
    found = smallest(sizes, wanted)
    assert (found is None) == (wanted > most)
    if found is not None:
        assert wanted <= found <= max(2 * wanted, wanted + 7)


@given(st.integers(1, 2**20))
def test_captured_contexts_reach_the_longest(most: int) -> None:
    lengths = context_lengths(most)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == most
    assert len(lengths) <= 6


@given(st.lists(st.integers(0, 12), unique=True))
def test_adjoining_slots_are_one_copy(slots: list[int]) -> None:
    runs = adjoining(slots)
    assert [slot + i for _, slot, count in runs for i in range(count)] == slots
    assert [start + i for start, _, count in runs for i in range(count)] == list(range(len(slots)))
    assert all(a[1] + a[2] != b[1] for a, b in itertools.pairwise(runs))
