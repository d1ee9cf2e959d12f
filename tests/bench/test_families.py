"""The bench of the model families: its pull brings whole blocks into another pool, and its figures are small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import families
from bench.families import line, open_pool, reference_of, rows_of, run
from bench.family_models import make_model, save_model
from bench.family_pull import pull_now
from services.common.transfer.errors import BlockInvalid

PROMPT = list(range(3, 83))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


def test_rows(folder: Path) -> None:
    model: Any = make_model("qwen3")
    rows = list(rows_of("qwen3", folder, reference_of(model, model.config.vocab_size), ["float32"]))
    assert {row.backend.split()[0] for row in rows} <= {"torch", "native"}
    for row in rows:
        worst = max(row.prefill, row.decode, row.prefix_hit, row.pulled_block)
        assert 0 < worst < 1e-4 * row.largest_logit
        assert "qwen3" in line(row)
    assert rows[0].reference_bf16 > 100 * rows[0].prefill


def test_a_pull_between_pools_of_two_models_is_refused(folder: Path, tmp_path: Path) -> None:
    """The header names the model that made the block."""
    other = save_model(make_model("qwen3", rms_norm_eps=1e-5), tmp_path)
    with open_pool(folder, "float32", compiled=False) as one, open_pool(other, "float32", compiled=False) as two:
        run(one, PROMPT, 0, range(5))
        with pytest.raises(BlockInvalid):
            pull_now(one, range(4), two, range(4))


def test_some_families_alone_leave_the_stored_results_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "RESULT_FILE", tmp_path / "stored.json")
    monkeypatch.setattr(families, "family_rows", lambda name, folder: iter(()))
    monkeypatch.setattr(families, "default_model_rows", lambda: iter(()))
    families.main(["--family", "llama2"])
    assert list(tmp_path.iterdir()) == []
    families.main(["--family", "llama2", "--output", str(tmp_path / "own.json")])
    assert [file.name for file in tmp_path.iterdir()] == ["own.json"]
    families.main([])
    assert {file.name for file in tmp_path.iterdir()} == {"own.json", "stored.json"}
