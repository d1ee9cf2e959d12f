"""PEFT folders: what is read, what is refused with which line, and what the digest depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.common.adapter_files import CONFIG_FILE, WEIGHTS_FILE, InvalidAdapter, read_adapter

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    save_file(tensors or {f"{PREFIX}A.weight": torch.randn(4, 32), f"{PREFIX}B.weight": torch.randn(16, 4)},
              folder / WEIGHTS_FILE)  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_an_adapter_is_its_content_and_not_its_name(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path / "one"))
    assert (first.rank, first.scaling, len(first.projections), len(first.digest)) == (4, 2.0, 1, 16)
    same = read_adapter(write(tmp_path / "other name", base_model_name_or_path="elsewhere", lora_dropout=0.5))
    assert same.digest == first.digest
    others = [
        write(tmp_path / "scaled", lora_alpha=4),
        write(tmp_path / "rs", use_rslora=True),
        write(tmp_path / "k", {f"{PREFIX}A.weight".replace("q_", "k_"): torch.zeros(4, 32),
                               f"{PREFIX}B.weight".replace("q_", "k_"): torch.zeros(16, 4)}),
        write(tmp_path / "zero", {f"{PREFIX}A.weight": torch.zeros(4, 32), f"{PREFIX}B.weight": torch.zeros(16, 4)}),
    ]  # fmt: skip
    digests = {first.digest, *(read_adapter(folder).digest for folder in others)}
    assert len(digests) == 5
    assert read_adapter(others[1]).scaling == 4.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_dora": True}, "use_dora = 'True' is not served"),
        ({"bias": "all"}, "bias = 'all' is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "LOHA"}, "peft_type must be LORA"),
        ({"r": 512}, "r = 512: must be 1 to 256"),
        ({"r": "8"}, "r = 8: must be 1 to 256"),
        ({"r": 8}, r"shapes \(4, 32\) and \(16, 4\), which r = 8 is not"),
        ({"lora_alpha": None}, "lora_alpha = None: must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan: must be a number"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head': only q_proj"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidAdapter, match=says):
        read_adapter(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{PREFIX}A.weight": torch.zeros(4, 32)}, "q_proj of layer 0 has lora_A alone"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, "lm_head.lora_A.weight has no place"),
        (
            {f"{PREFIX}A.weight": torch.zeros(4, 32), f"{PREFIX}A.default.weight": torch.ones(4, 32)},
            "lora_A.*weight is there under another name, too",
        ),
        (
            {name: torch.zeros(4, 32) for name in (f"{PREFIX}A.weight", f"{PREFIX}A.weight".replace("s.0", "s.00"))},
            "lora_A.weight is there under another name, too",
        ),
        ({f"{PREFIX}magnitude_vector": torch.zeros(4)}, "is F32 \\[4\\]: a matrix of"),
        ({f"{PREFIX}A.weight": torch.zeros(4, 32, dtype=torch.int32)}, "is I32 \\[4, 32\\]: a matrix of"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(InvalidAdapter, match=says):
        read_adapter(write(tmp_path, tensors))


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match=f"{CONFIG_FILE} cannot be read: No such file"):
        read_adapter(tmp_path)
    folder = write(tmp_path / "damaged")
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[:-1])
    with pytest.raises(InvalidAdapter, match="not a readable safetensors file"):
        read_adapter(folder)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(InvalidAdapter, match=WEIGHTS_FILE):
        read_adapter(folder)
    with pytest.raises(InvalidAdapter, match="r = 4: at most 2 is served"):
        read_adapter(write(tmp_path / "rank"), max_rank=2)
    with pytest.raises(InvalidAdapter, match="it has 192 parameters: no more than 191 have room"):
        read_adapter(write(tmp_path / "size"), max_parameters=191)
