"""`python -m bench.export_model FOLDER`: a GGUF model as a Hugging Face folder, for engines that read nothing else.

Writes BF16 safetensors (dequantised), config.json, generation_config.json, tokenizer.json and tokenizer_config.json
with the chat template. The mesh serves the folder too (`kvmesh up --model NAME=FOLDER`): the same tokens and the same
weights, rounded to BF16 as it rounds those of a GGUF file. No sampling is recommended in it, so requests that leave it
out draw at temperature 1. Llama without rope scaling only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.common.models import DEFAULT_MODEL, ModelSource, resolve_model
from services.common.settings import ConfigurationError
from services.common.text.gguf_tokenizer import load_gguf_tokenizer
from services.worker.model.config import ModelConfig
from services.worker.model.errors import InvalidWeights, UnsupportedModel
from services.worker.model.model_files import open_model

_EOS, _BOS = "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"


def export(source: ModelSource, folder: Path, num_layers: int | None = None) -> None:
    """Write the folder, which may exist. Raises UnsupportedModel, InvalidWeights or ConfigurationError.

    num_layers: only the first; what such a model says makes no sense, and takes the time of a smaller one.
    """
    if not source.is_gguf:
        raise UnsupportedModel(f"{source.path.name}: not a GGUF file")
    model = open_model(source.path)
    tokenizer, metadata = load_gguf_tokenizer(source.path)
    special = {
        key: metadata[name] for key, name in (("bos_token_id", _BOS), ("eos_token_id", _EOS)) if name in metadata
    }
    config = hugging_face_config(model.config) | special
    num_layers = min(num_layers or model.config.num_layers, model.config.num_layers)
    config["num_hidden_layers"] = num_layers
    folder.mkdir(parents=True, exist_ok=True)
    weights, _ = model.read()
    tensors = {name: weights.read(name).bfloat16().contiguous() for name in sorted(weights.names())}
    tensors = {name: tensor for name, tensor in tensors.items() if _layer_of(name) < num_layers}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    # The library leaves it to this user alone.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    _write(folder / "generation_config.json", special)
    _write(folder / "tokenizer_config.json", _tokenizer_config(metadata, special, model.config.max_positions))
    tokenizer.save(str(folder / "tokenizer.json"))


def _layer_of(name: str) -> int:
    """Of a tensor; -1 outside of the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama. Raises UnsupportedModel for what the names here cannot say."""
    if config.architecture != "llama" or config.rope.scaling is not None or config.moe is not None:
        raise UnsupportedModel(f"architecture {config.architecture!r}: only Llama without rope scaling is exported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.output_bias,
        "torch_dtype": str(torch.bfloat16).removeprefix("torch."),
    }


def _tokenizer_config(metadata: dict[str, Any], special: dict[str, int], max_positions: int) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {key.removesuffix("_id"): tokens[token] for key, token in special.items()}
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        **named,
        **({"chat_template": template} if template else {}),
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> int:
    """Exit status 1 with one line when the model cannot be exported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a known name or a .gguf file")
    parser.add_argument("--layers", type=int, help="only so many, from the first: for the speed of a smaller model")
    arguments = parser.parse_args()
    try:
        export(resolve_model(arguments.model), arguments.folder, arguments.layers)
    except (ConfigurationError, UnsupportedModel, InvalidWeights) as error:
        sys.stderr.write(f"export: {error}\n")
        return 1
    print(f"{arguments.folder} is written; `kvmesh up --model NAME={arguments.folder}` serves it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
