"""The model digest changes with everything that changes keys and values, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.model.config import ModelConfig, RopeScaling
from services.worker.model.digest import model_digest
from services.worker.model.model_files import open_model
from services.worker.model.reading import WeightFile, read_weights


@pytest.fixture(scope="module")
def config(model_path: Path) -> ModelConfig:
    return open_model(model_path).config


def test_every_part_counts(config: ModelConfig) -> None:
    def digest(changed: ModelConfig = config, weights: bytes = b"w", context: int = 4096) -> bytes:
        return model_digest(changed, weights=weights, dtype="bfloat16", served_context=context)

    scaled = RopeScaling("linear", factor=2.0)
    variants = [
        digest(),
        digest(weights=b"v"),
        digest(context=4097),
        digest(replace(config, rope=replace(config.rope, theta=1e4))),
        digest(replace(config, rope=replace(config.rope, scaling=scaled))),
        digest(replace(config, rope=replace(config.rope, scaling=replace(scaled, factor=3.0)))),
        digest(replace(config, attention_scale=0.5)),
        digest(replace(config, windows=(64,) * config.num_layers)),
        digest(replace(config, rms_norm_eps=1e-6)),
        model_digest(config, weights=b"w", dtype="float32", served_context=4096),
    ]
    assert len(set(variants)) == len(variants)
    assert all(len(variant) == 16 for variant in variants)
    assert digest() == variants[0]


def test_golden(config: ModelConfig) -> None:
    """The digest is part of block identity across processes and releases: it may not drift by accident."""
    digest = model_digest(config, weights=bytes(16), dtype="bfloat16", served_context=8192)
    assert digest.hex() == "6abaa06574a7415df54b6fbdf6c309a9"


def test_files(tmp_path: Path) -> None:
    def digest(*names: str) -> bytes:
        return read_weights([WeightFile(tmp_path / name, ()) for name in names]).digest

    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "renamed").write_bytes(b"one")
    assert digest("a", "b") != digest("b", "a")
    assert digest("a") == digest("renamed")
    before = digest("a")
    (tmp_path / "a").write_bytes(b"onf")
    assert digest("a") != before
    assert len(before) == 16


def test_golden_weights(tmp_path: Path) -> None:
    """What a replica computes of the same files may not drift between releases either."""
    (tmp_path / "a").write_bytes(b"one")
    assert read_weights([WeightFile(tmp_path / "a", ())]).digest.hex() == "f8c18e029e77f26d6c081c8a152efa41"
