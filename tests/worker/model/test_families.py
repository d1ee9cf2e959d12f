"""Every model family computes what transformers computes, however its tokens arrive: small models, random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.family_models import MODELS, VOCAB_SIZE, make_model, save_model
from services.worker.model.layout import KvDtype
from services.worker.model.runner import CpuRunner

from .conftest import loaded
from .steps import Chunk, run, run_in_chunks

MAX_ERROR_F32 = 1e-4
# BF16 keeps 8 bits; measured over the families: 0.006 to 0.035. The median, as a token near a tie between two experts
# may go to the other one.
MEDIAN_ERROR_BF16 = 0.06
NUM_TOKENS = 200
NUM_BLOCKS = 48
CONTEXT = 256
TABLE = list(range(13))


@dataclass(frozen=True)
class Case:
    """A family loaded with one dtype and backend, and what transformers says: logits [200, vocab]."""

    runner: CpuRunner
    tokens: list[int]
    expected: torch.Tensor


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A saved model, and its logits of the tokens."""
    model = make_model(request.param)
    with torch.inference_mode():
        expected: torch.Tensor = model(torch.tensor([tokens()])).logits[0]
    return save_model(model, tmp_path_factory.mktemp("family"), shard_size="60KB"), expected


@pytest.fixture(scope="module", params=["torch float32", "native float32", "torch bfloat16", "native bfloat16"])
def case(request: pytest.FixtureRequest, family: tuple[Path, torch.Tensor]) -> Iterator[Case]:
    backend, dtype = request.param.split()
    kv_dtype: KvDtype = "float32" if dtype == "float32" else "bfloat16"
    folder, expected = family
    with loaded(folder, kv_dtype, num_blocks=NUM_BLOCKS, context=CONTEXT, compiled=backend == "native") as runner:
        assert runner.spec.backend.startswith(backend)
        yield Case(runner, tokens(), expected)


def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()


def test_prefill_agrees(case: Case) -> None:
    logits = run(case.runner, Chunk(case.tokens, 0, TABLE))
    errors = (logits - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
    if case.runner.spec.dtype == "float32":
        assert errors.max().item() < MAX_ERROR_F32
    else:
        assert errors.median().item() < MEDIAN_ERROR_BF16


def test_no_cut_changes_a_bit(case: Case) -> None:
    """Chunked prefill, then decode token by token; alone and beside others."""
    whole = run(case.runner, Chunk(case.tokens, 0, TABLE))
    other = [40 - slot for slot in TABLE]
    assert torch.equal(run_in_chunks(case.runner, case.tokens[:150], (7, 64, 1, 30), other), whole[:150])
    decoded = [run(case.runner, Chunk([case.tokens[at]], at, other)) for at in range(150, 156)]
    assert torch.equal(torch.cat(decoded), whole[150:156])
    beside = Chunk(case.tokens[:21], 0, [45, 46])
    together = run(case.runner, beside, Chunk([case.tokens[156]], 156, other), last_only=True)
    assert torch.equal(together[1], whole[156])
    assert torch.equal(together[0], whole[20])


def test_prefix_hit_and_copied_blocks(case: Case) -> None:
    """Blocks that another sequence computed, in its slots, and copied out and into other slots as a pull does."""
    pool = case.runner.decoder.pool
    whole = run(case.runner, Chunk(case.tokens, 0, TABLE))
    shared = [*TABLE[:7], 20, 21, 22, 23, 24, 25]
    assert torch.equal(run(case.runner, Chunk(case.tokens[112:], 112, shared)), whole[112:])
    moved = [30, 29, 33, 32, 31, 35, 34, *shared[7:]]
    payload = pool[TABLE[:7]].clone()
    pool[TABLE[:7]] = torch.nan
    pool[moved[:7]] = payload
    assert torch.equal(run(case.runner, Chunk(case.tokens[112:], 112, moved)), whole[112:])
