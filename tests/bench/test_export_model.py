"""The exported folder is the same model: configuration, weights rounded to BF16, tokens and chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.export_model import export, hugging_face_config
from services.common.models import DEFAULT_MODEL, ModelSource, resolve_model
from services.gateway.text.text_model import load_text_model
from services.worker.model.config import RopeScaling
from services.worker.model.errors import UnsupportedModel
from services.worker.model.model_files import open_model

TEXT = "Hello, wörld!  12345\n<|im_start|>user\n\tdef f(x):\n"


def test_the_folder_is_the_model(tmp_path: Path) -> None:
    source = resolve_model(DEFAULT_MODEL)
    export(source, tmp_path)
    # Whoever may read one file may read all.
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    original, exported = open_model(source.path), open_model(tmp_path)
    assert exported.config == original.config
    weights, expected_weights = exported.read()[0], original.read()[0]
    assert weights.names() == expected_weights.names()
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        assert torch.equal(weights.read(name), expected_weights.read(name).bfloat16())
    text, expected = load_text_model(ModelSource("m", tmp_path)), load_text_model(source)
    assert text.encode_text(TEXT) == expected.encode_text(TEXT)
    assert set(text.eos_token_ids) <= set(expected.eos_token_ids)
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert text.encode_chat(messages) == expected.encode_chat(messages)


def test_what_the_names_cannot_say_is_refused(tmp_path: Path) -> None:
    config = open_model(resolve_model(DEFAULT_MODEL).path).config
    scaled = replace(config, rope=replace(config.rope, scaling=RopeScaling("linear", factor=2.0)))
    with pytest.raises(UnsupportedModel, match="rope scaling"):
        hugging_face_config(scaled)
    with pytest.raises(UnsupportedModel, match="not a GGUF"):
        export(ModelSource("m", tmp_path), tmp_path)
