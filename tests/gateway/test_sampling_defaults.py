"""What a model recommends fills what a request leaves out, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.request import Sampling
from services.gateway.text.sampling_defaults import NEUTRAL, folder_defaults, gguf_defaults, with_defaults
from services.gateway.text.text_model import TextModel


def test_the_packaged_model_has_its_card_s_recommendation(text_model: TextModel) -> None:
    assert text_model.sampling_defaults == msgspec.structs.replace(NEUTRAL, temperature=0.2, top_p=0.9)


def test_a_request_s_own_values_win() -> None:
    defaults = msgspec.structs.replace(NEUTRAL, temperature=0.2, top_p=0.9)
    given = Sampling(temperature=1.0, top_k=0, seed=3, num_logprobs=2)
    filled = with_defaults(given, defaults)
    assert (filled.temperature, filled.top_p, filled.top_k) == (1.0, 0.9, 0)
    assert (filled.seed, filled.num_logprobs, filled.repetition_penalty) == (3, 2, 1.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "temperature": "warm", "top_p": 0.0, "min_p": True}, {}),
        ({"do_sample": True, "repetition_penalty": 1.1, "top_k": None}, {"repetition_penalty": 1.1}),
    ],
)
def test_folder(config: dict[str, object], expected: dict[str, float]) -> None:
    assert folder_defaults(config) == msgspec.structs.replace(NEUTRAL, **expected)


def test_gguf() -> None:
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.top_p": 3.0}
    assert gguf_defaults("other", metadata) == msgspec.structs.replace(NEUTRAL, temperature=0.7, top_k=40)
    assert gguf_defaults("other", {}) == NEUTRAL
