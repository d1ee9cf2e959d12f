"""How models divide: every part belongs to one rank, what does not divide is refused, ranks read their part alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.family_models import make_model, save_model
from services.common.artifacts.chunk_reader import num_chunks
from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.hf_config import read_hf_config
from services.worker.model.model_files import ModelFiles, open_model
from services.worker.model.rank_loading import Ranks, bytes_to_read, load_part, rank_chunks, read_part
from services.worker.model.shard import Parallelism, Shard, share_bytes
from services.worker.model.weights import ExpertWeights, LayerWeights, ModelWeights, load_weights, weight_bytes


def shards(config: ModelConfig, parallelism: Parallelism) -> list[Shard]:
    return [Shard(config, parallelism, rank) for rank in range(parallelism.num_ranks)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_hf_config(save_model(make_model("qwen3-moe"), tmp_path_factory.mktemp("moe")))


@given(tensor=st.integers(1, 4), pipeline=st.integers(1, 6), expert=st.integers(1, 4), vocabulary=st.integers(64, 999))
@settings(max_examples=60, deadline=None)
def test_every_part_belongs_to_one_rank(
    moe: ModelConfig, tensor: int, pipeline: int, expert: int, vocabulary: int
) -> None:
    parallelism = Parallelism(tensor, pipeline, expert)
    size = parallelism.stage_size
    config = replace(
        moe,
        num_layers=7,
        num_heads=4 * size,
        num_kv_heads=2 * size,
        intermediate_size=32 * size,
        vocab_size=vocabulary,
        moe=replace(moe.moe, num_experts=3 * expert, intermediate_size=16 * tensor, sparse=(True,) * 6 + (False,)),
    )
    parts = shards(config, parallelism)
    for stage in range(pipeline):
        ranks = [part for part in parts if part.stage == stage]
        assert len({part.layers for part in ranks}) == 1
        for sizes, whole in (
            ("heads", 4 * size),
            ("kv_heads", 2 * size),
            ("inner", 32 * size),
            ("vocabulary", vocabulary),
        ):
            assert [index for part in ranks for index in getattr(part, sizes)] == list(range(whole))
        held = sorted((expert, column) for part in ranks for expert in part.experts for column in part.expert_inner)
        assert held == [(expert, column) for expert in range(3 * parallelism.expert) for column in range(16 * tensor)]
    assert [layer for part in parts[::size] for layer in part.layers] == list(range(7))
    assert all(part.layers and part.config.num_layers == len(part.layers) for part in parts)


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((3, 1, 1), {}, "tensor_parallel=3: does not divide 2 KV heads"),
        ((1, 4, 1), {}, "pipeline_parallel=4: the model has 3 layers"),
        ((1, 1, 4), {}, "expert_parallel=4: does not divide 6 experts"),
        ((1, 1, 2), {"moe": None}, "expert_parallel=2: the model has no experts"),
        ((2, 1, 2), {}, "tensor_parallel=2 times expert_parallel=2: does not divide 2 KV heads"),
        ((2, 1, 1), {}, "tensor_parallel=2: does not divide 48 inner columns into multiples of 16"),
        ((2, 1, 1), {"moe": None, "intermediate_size": 48}, "tensor_parallel=2: does not divide 48 inner columns"),
    ],
)
def test_what_does_not_divide_is_refused(
    moe: ModelConfig, sizes: tuple[int, int, int], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Shard(replace(moe, **changes), Parallelism(*sizes), 0)


class Alone:
    """Ranks as seen by one, whose peers have read what `others` says, digests of all chunks behind each other."""

    is_spread = False

    def __init__(self, shard: Shard, others: Sequence[bytes]) -> None:
        self.shard = shard
        self._others = others

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values, *(torch.frombuffer(bytearray(other), dtype=torch.uint8) for other in self._others)]


def read(model: ModelFiles, shard: Shard, others: Sequence[bytes] = ()) -> tuple[ModelWeights, bytes]:
    ranks: Ranks = Alone(shard, others)  # type: ignore[assignment]
    source, digest = read_part(model, ranks, None)
    return load_part(source, shard, "float32"), digest


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama3", (2, 1, 1)),
        ("phi3", (2, 3, 1)),
        ("qwen2", (2, 2, 1)),
        ("mixtral", (2, 1, 1)),
        ("qwen3-moe", (1, 2, 2)),
    ],
)
def test_ranks_have_their_part_and_no_more(family: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    model = open_model(save_model(make_model(family), tmp_path, shard_size="60KB"))
    source, digest = model.read()
    whole = load_weights(source, model.config, torch.float32)
    parts = shards(model.config, Parallelism(*sizes))
    chunks = [rank_chunks(model, part) for part in parts]
    every = [list(range(num_chunks(file.path.stat().st_size))) for file in model.files]
    assert [sorted(set().union(*of_file)) for of_file in zip(*chunks, strict=True)] == every
    digests = _all_digests(model)
    for part in parts:
        weights, found = read(model, part, [digests])
        assert found == digest
        assert weight_bytes(weights) <= share_bytes(part, 4).total, "asserted by the loader too"
        assert weight_bytes(weights) < weight_bytes(whole)
        _check_part(part, weights, whole)
    assert sum(share_bytes(part, 4).divided for part in parts) < 1.01 * weight_bytes(whole) + _second_table(parts[0])


def _second_table(shard: Shard) -> int:
    """First and last stage both have a tensor that embedding and head share."""
    whole = shard.whole
    return 4 * whole.vocab_size * whole.hidden_size if whole.tie_embeddings and shard.parallelism.pipeline > 1 else 0


def _all_digests(model: ModelFiles) -> bytes:
    """Of files of one chunk each."""
    return b"".join(hashlib.sha256(file.path.read_bytes()).digest() for file in model.files)


def _check_part(part: Shard, weights: ModelWeights, whole: ModelWeights) -> None:
    rows = slice(part.vocabulary.start, part.vocabulary.stop)
    if part.is_first:
        assert torch.equal(weights.embedding, whole.embedding[rows])
    if part.is_last:
        assert torch.equal(weights.head, whole.head[rows])
    for layer, own in zip(part.layers, weights.layers, strict=True):
        _check_layer(part, own, whole.layers[layer])


def _check_layer(part: Shard, own: LayerWeights, layer: LayerWeights) -> None:
    size = part.whole.head_dim
    heads = slice(part.heads.start * size, part.heads.stop * size)
    assert torch.equal(own.output, layer.output[:, heads])
    query, kv = part.whole.num_heads * size, part.whole.num_kv_heads * size
    own_kv = range(part.kv_heads.start * size, part.kv_heads.stop * size)
    rows = [*range(heads.start, heads.stop), *(query + i for i in own_kv), *(query + kv + i for i in own_kv)]
    assert torch.equal(own.qkv, layer.qkv[rows])
    if isinstance(layer.mlp, ExpertWeights):
        assert isinstance(own.mlp, ExpertWeights)
        experts = slice(part.experts.start, part.experts.stop)
        assert torch.equal(own.mlp.router, layer.mlp.router)
        assert torch.equal(own.mlp.down, layer.mlp.down[experts][:, :, part.expert_inner])
        return
    assert not isinstance(own.mlp, ExpertWeights)
    assert torch.equal(own.mlp.up, layer.mlp.up[part.inner])
    assert torch.equal(own.mlp.down, layer.mlp.down[:, part.inner])


def test_stages_do_not_read_each_others_files(tmp_path: Path) -> None:
    model = open_model(save_model(make_model("llama2"), tmp_path, shard_size="60KB"))
    assert len(model.files) > 3
    first, second = shards(model.config, Parallelism(1, 2, 1))
    assert sum(map(len, rank_chunks(model, first))) < len(model.files)
    assert sum(map(len, rank_chunks(model, second))) < len(model.files)
    assert bytes_to_read(model, first) + bytes_to_read(model, second) < 1.5 * model.size


def test_ranks_that_read_different_bytes_do_not_start(tmp_path: Path) -> None:
    model = open_model(save_model(make_model("llama2"), tmp_path))
    (shard, _) = shards(model.config, Parallelism(2, 1, 1))
    with pytest.raises(InvalidWeights, match="chunk 0 was read 2 times, differently"):
        read(model, shard, [b"x" * 32])


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    model = open_model(save_model(make_model("llama2"), tmp_path))
    wrong = replace(model.config, intermediate_size=192)
    with pytest.raises(InvalidWeights, match="192 is needed of size"):
        model.part(Shard(wrong, Parallelism(2), 0))
