"""Groups over several hosts: the bits of one process, whole blocks in and out, other files on another host refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bench.family_models import VOCAB_SIZE, make_model, save_model
from services.worker.engine.memory import DEFAULT_SPREAD_STAGING_BYTES
from services.worker.model.errors import InvalidWeights
from services.worker.model.runner import CpuRunner
from services.worker.model.shard import Parallelism
from tests.worker.model.conftest import loaded
from tests.worker.model.steps import Chunk, make_step, run
from tests.worker.parallel.spread_group import SpreadGroup, spread_group
from tests.worker.parallel.thread_group import CONTEXT, NUM_BLOCKS

MAX_ERROR_F32 = 1e-4
TABLE = list(range(9))
OTHERS = [40 - slot for slot in TABLE]
TOKENS = torch.randint(3, VOCAB_SIZE, (130,), generator=torch.Generator().manual_seed(1)).tolist()


def run_group(group: SpreadGroup, *chunks: Chunk) -> torch.Tensor:
    group.runner.submit(make_step(chunks))
    return group.runner.collect()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (2, 1)], ids=str)
def test_blocks_are_those_of_one_process(sizes: tuple[int, int], tmp_path: Path) -> None:
    path, parallelism = save_model(make_model("llama3"), tmp_path), Parallelism(*sizes)
    with loaded(path, "float32", num_blocks=NUM_BLOCKS, context=CONTEXT, compiled=True) as one:
        expected = run(one, Chunk(TOKENS, 0, TABLE))
        with spread_group(path, parallelism) as group:
            block_bytes = one.spec.layout.block_bytes
            assert group.runner.spec.digest == one.spec.digest
            assert group.runner.spec.layout == one.spec.layout
            assert group.runner.spec.memory.staging_bytes == DEFAULT_SPREAD_STAGING_BYTES // block_bytes * block_bytes
            assert_close(run_group(group, Chunk(TOKENS, 0, TABLE)), expected, parallelism)
            group.gather(TABLE, TABLE)
            assert_close(group.staging[TABLE], one.decoder.pool[TABLE], parallelism)
            continues_with_blocks_from_elsewhere(group, one, parallelism)


def continues_with_blocks_from_elsewhere(group: SpreadGroup, one: CpuRunner, parallelism: Parallelism) -> None:
    """A scatter is in place before the step that is submitted after it."""
    come = list(range(8))
    group.staging[come] = one.decoder.pool[come]
    group.copier.scatter(come, OTHERS[:8])
    tail = Chunk(TOKENS[128:], 128, OTHERS)
    assert_close(run_group(group, tail), run(one, Chunk(TOKENS[128:], 128, TABLE)), parallelism)
    group.gather(OTHERS[:8], [15 - slot for slot in come])
    back = torch.stack([group.staging[15 - slot] for slot in come])
    assert torch.equal(back, one.decoder.pool[come]), "what was brought is unchanged"


def assert_close(found: torch.Tensor, expected: torch.Tensor, parallelism: Parallelism) -> None:
    if parallelism.stage_size == 1:
        assert torch.equal(found, expected), "stages change no bit"
    else:
        assert (found - expected).norm() / expected.norm() < MAX_ERROR_F32


def test_weights_that_differ_between_hosts_are_refused(tmp_path: Path) -> None:
    """One byte of a layer that only the second stage has."""
    path = save_model(make_model("llama3"), tmp_path / "a")
    other = Path(shutil.copytree(path, tmp_path / "b"))
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(InvalidWeights, match="differently each time on the ranks' hosts"):
        with spread_group(path, Parallelism(1, 2), others=other):
            pass


def test_another_model_on_another_host_is_refused(tmp_path: Path) -> None:
    path = save_model(make_model("llama3"), tmp_path / "a")
    other = save_model(make_model("llama3", rms_norm_eps=1e-3), tmp_path / "b")
    with pytest.raises(InvalidWeights, match="rank 1 has another model on its host than rank 0"):
        with spread_group(path, Parallelism(1, 2), others=other):
            pass
