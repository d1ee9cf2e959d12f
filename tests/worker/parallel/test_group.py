"""Groups compute what one process computes: every family, every kind of parallelism, real gloo between threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.family_gguf import write_gguf
from bench.family_models import VOCAB_SIZE, make_model, save_model
from bench.rank_group import rank_place
from services.worker.errors import RankLost
from services.worker.model.layout import ComputeDtype
from services.worker.model.model_files import open_model
from services.worker.model.shard import Parallelism, Shard
from services.worker.parallel.group import Group
from services.worker.parallel.meeting import meeting
from tests.worker.model.conftest import loaded
from tests.worker.model.steps import Chunk, make_step, run
from tests.worker.parallel.thread_group import CONTEXT, NUM_BLOCKS, thread_group

MAX_ERROR_F32 = 1e-4
TABLE = list(range(9))
TOKENS = torch.randint(3, VOCAB_SIZE, (130,), generator=torch.Generator().manual_seed(1)).tolist()
# family, ranks by kind (tensor, pipeline, expert).
GROUPS = [
    ("llama3", (2, 1, 1)),
    ("llama2", (4, 1, 1)),
    ("qwen2", (2, 3, 1)),
    ("qwen3", (1, 2, 1)),
    ("gemma2", (2, 2, 1)),
    ("gemma3", (1, 3, 1)),
    ("phi3", (2, 1, 1)),
    ("mixtral", (2, 1, 1)),
    ("mixtral", (1, 2, 2)),
    ("qwen3-moe", (1, 1, 2)),
]


@pytest.mark.parametrize(("family", "sizes"), GROUPS, ids=[f"{name}-{'x'.join(map(str, n))}" for name, n in GROUPS])
def test_agrees_with_one_process(family: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    path = save_model(make_model(family, intermediate_size=128), tmp_path, shard_size="60KB")
    check_against_one_process(path, Parallelism(*sizes))


def test_gguf(tmp_path: Path) -> None:
    """Rows of quantised files are found, and llama.cpp's order of them undone, in parts too."""
    check_against_one_process(write_gguf(make_model("llama3"), tmp_path / "model.gguf"), Parallelism(2, 2))


def check_against_one_process(path: Path, parallelism: Parallelism) -> None:
    with loaded(path, "float32", num_blocks=NUM_BLOCKS, context=CONTEXT, compiled=True) as one:
        expected = run(one, Chunk(TOKENS, 0, TABLE))
        with thread_group(path, parallelism) as group:
            group.runner.submit(make_step([Chunk(TOKENS, 0, TABLE)]))
            found = group.runner.collect()
            assert group.runner.spec.digest == one.spec.digest, "their blocks are interchangeable"
            written = group.pool[TABLE], one.decoder.pool[TABLE]
            if parallelism.stage_size == 1:
                assert group.runner.spec.backend == one.spec.backend
                assert torch.equal(found, expected), "stages change no bit"
                assert torch.equal(*written)
            else:
                assert group.runner.spec.backend != one.spec.backend
                errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert errors.max().item() < MAX_ERROR_F32
                assert torch.allclose(*written, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_cut_changes_a_bit(dtype: ComputeDtype, tmp_path: Path) -> None:
    """Chunked prefill, then decode, beside others and alone; and the same again from a group of its own."""
    path = save_model(make_model("mixtral"), tmp_path)
    whole = []
    for _ in range(2):
        with thread_group(path, Parallelism(2, 1, 1), dtype) as group:

            def run_group(*chunks: Chunk) -> torch.Tensor:
                group.runner.submit(make_step(chunks))
                return group.runner.collect()

            whole.append(run_group(Chunk(TOKENS, 0, TABLE)))
            other = [40 - slot for slot in TABLE]
            run_group(Chunk(TOKENS[:50], 0, other))
            chunked = run_group(Chunk(TOKENS[:21], 0, [45, 46]), Chunk(TOKENS[50:129], 50, other))
            assert torch.equal(chunked[21:], whole[0][50:129])
            assert torch.equal(run_group(Chunk(TOKENS[129:], 129, other)), whole[0][129:])
    assert torch.equal(*whole)


def test_a_step_without_logits_and_a_malformed_one(tmp_path: Path) -> None:
    with thread_group(save_model(make_model("llama3"), tmp_path), Parallelism(2, 2, 1)) as group:
        step = make_step([Chunk(TOKENS, 0, TABLE)], last_only=True)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            group.runner.submit(make_step([Chunk([VOCAB_SIZE], 0, [0])]))
        group.runner.submit(replace(step, logit_rows=step.logit_rows[:0]))
        assert group.runner.collect().shape == (0, VOCAB_SIZE)
        group.runner.submit(step)
        assert group.runner.collect().isfinite().all()


def test_ranks_meet_on_the_loopback_interface_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with thread_group(save_model(make_model("llama3"), tmp_path), Parallelism(2)) as group:
        group.runner.submit(make_step([Chunk(TOKENS, 0, TABLE)], last_only=True))
        assert group.runner.collect().isfinite().all()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "nowhere0", "what this process starts is none of the group's business"


def test_a_rank_that_takes_no_part_in_a_step_is_lost_long_before_a_load_would_be(tmp_path: Path) -> None:
    config = open_model(save_model(make_model("llama3"), tmp_path)).config
    shards = [Shard(config, Parallelism(2), rank) for rank in range(2)]
    store = os.memfd_create("store")

    def join(shard: Shard) -> Group:
        met = meeting(rank_place(shard.parallelism, shard.rank, (), store), 2)
        return Group(shard, met, load_timeout_s=120.0, step_timeout_s=0.2)

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, shards))
        met = [threads.submit(group.meet) for group in groups]
        for one in met:
            one.result(60)
        with pytest.raises(RankLost):
            groups[0].sum(torch.ones(4))
        for group in groups:
            group.close()
    os.close(store)
