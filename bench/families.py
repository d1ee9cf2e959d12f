"""`python -m bench.families`: the largest difference of logits from `transformers`, for every model family.

Each family is a small model with random weights (bench/family_models.py), stored as safetensors and as GGUF; the
default model has its real weights. Measured are a prefill in one step, a decode token by token after chunked prefill,
a prompt whose first blocks another sequence computed in the same pool, and one whose first blocks came by a real pull
(UCX, headers and checksums verified) from another replica's pool into other slots. Differences are absolute, from
transformers in float32; "its own" is what transformers in bfloat16 differs from itself.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.family_gguf import write_gguf
from bench.family_models import MODELS, make_model, quiet, save_model
from bench.family_pull import Pool, pull_now
from services.common.models import DEFAULT_MODEL, resolve_model
from services.common.telemetry import configure_logging
from services.worker.model.layout import ComputeDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.step import StepInput

RESULT_FILE = Path(__file__).parent / "results" / "families.json"
NUM_TOKENS, SHARED_BLOCKS, DECODED = 200, 7, 24
NUM_BLOCKS, CONTEXT = 40, 256
TABLE = list(range(13))
# What the conventions of GGUF have no word for, so that both files mean the same model.
GGUF_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": None},
}


@dataclass(frozen=True)
class Row:
    """One line of the table; differences are of logits, `largest_logit` and `reference_bf16` tell their scale."""

    family: str
    weights: str
    dtype: str
    backend: str
    prefill: float
    decode: float
    prefix_hit: float
    pulled_block: float
    largest_logit: float
    reference_bf16: float


@dataclass(frozen=True)
class Reference:
    """What transformers says of the tokens: float32 logits, and how far its own bfloat16 is from them."""

    tokens: list[int]
    logits: torch.Tensor
    bf16_difference: float


def reference_of(model: Any, vocab_size: int) -> Reference:
    """Logits of random tokens. The model is left in float32."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, vocab_size, (NUM_TOKENS,), generator=generator)
    with torch.inference_mode(), quiet():
        logits = model(tokens[None]).logits[0]
        stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        rounded = model.bfloat16()(tokens[None]).logits[0].float()
        model.float().load_state_dict(stored)
    return Reference(tokens.tolist(), logits, largest(rounded, logits))


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference."""
    return (found - expected).abs().max().item()


@contextmanager
def open_pool(path: Path, dtype: ComputeDtype, *, compiled: bool) -> Iterator[Pool]:
    """A model over a pool of its own."""
    layout = kv_layout(open_model(path).config, dtype)
    memory = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
    with load_runner(path, dtype=dtype, pool_buffer=memory, served_context=CONTEXT, compiled=compiled) as runner:
        yield Pool(runner, memory)


def run(pool: Pool, tokens: Sequence[int], start: int, table: Sequence[int]) -> torch.Tensor:
    """Logits of tokens at `start` of a sequence, computed in one step."""
    count = len(tokens)
    pool.runner.submit(
        StepInput(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(start, start + count, dtype=np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.array([start + count], np.int32),
            block_tables=np.array([table], np.int32),
            logit_rows=np.arange(count, dtype=np.int32),
        )
    )
    return pool.runner.collect()


def measure(family: str, path: Path, dtype: ComputeDtype, reference: Reference, *, compiled: bool) -> Row | None:
    """One row; None where the compiled kernels were asked for and cannot be had."""
    tokens, expected = reference.tokens, reference.logits
    shared, chunk = 16 * SHARED_BLOCKS, 48
    with ExitStack() as stack:
        first = stack.enter_context(open_pool(path, dtype, compiled=compiled))
        if compiled and first.runner.spec.backend == "torch":
            return None
        second = stack.enter_context(open_pool(path, dtype, compiled=compiled))
        prefill = run(first, tokens, 0, TABLE)
        other = [39 - slot for slot in TABLE]
        for start in range(0, NUM_TOKENS - DECODED, chunk):
            run(first, tokens[start : min(start + chunk, NUM_TOKENS - DECODED)], start, other)
        decoded = [run(first, [tokens[at]], at, other) for at in range(NUM_TOKENS - DECODED, NUM_TOKENS)]
        hit = run(first, tokens[shared:], shared, [*TABLE[:SHARED_BLOCKS], *range(13, 19)])
        moved = [21, 3, 30, 4, 17, 0, 8]
        pull_now(first, TABLE[:SHARED_BLOCKS], second, moved)
        pulled = run(second, tokens[shared:], shared, [*moved, 22, 1, 23, 2, 24, 5])
        spec = first.runner.spec
        return Row(
            family=family,
            weights=spec.weight_format,
            dtype=dtype,
            backend=spec.backend,
            prefill=largest(prefill, expected),
            decode=largest(torch.cat(decoded), expected[-DECODED:]),
            prefix_hit=largest(hit, expected[shared:]),
            pulled_block=largest(pulled, expected[shared:]),
            largest_logit=expected.abs().max().item(),
            reference_bf16=reference.bf16_difference,
        )


def rows_of(family: str, path: Path, reference: Reference, dtypes: Sequence[ComputeDtype]) -> Iterator[Row]:
    """Rows of one file, for every dtype and backend."""
    for dtype in dtypes:
        for compiled in (False, True):
            row = measure(family, path, dtype, reference, compiled=compiled)
            if row is not None:
                yield row


def family_rows(name: str, folder: Path) -> Iterator[Row]:
    """Rows of a family's small model, in both formats."""
    model: Any = make_model(name)
    reference = reference_of(model, model.config.vocab_size)
    yield from rows_of(name, save_model(model, folder, shard_size="60KB"), reference, ("float32", "bfloat16"))
    changes = GGUF_CHANGES.get(name)
    if changes:
        model = make_model(name, **changes)
        reference = reference_of(model, model.config.vocab_size)
    yield from rows_of(name, write_gguf(model, folder / "model.gguf"), reference, ("float32",))


def default_model_rows() -> Iterator[Row]:
    """Rows of the default model with its real weights, which transformers reads from the same file by itself."""
    from transformers import modeling_gguf_pytorch_utils

    load_gguf_checkpoint: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    path = resolve_model(DEFAULT_MODEL).path
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = load_gguf_checkpoint(str(path))["config"]
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**fields, "tie_word_embeddings": True}))
        model.config._attn_implementation = "eager"
        model.load_state_dict(
            load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"], strict=False
        )
        model.tie_weights()
    reference = reference_of(model.eval(), model.config.vocab_size)
    yield from rows_of("SmolLM2-135M", path, reference, ("float32", "bfloat16"))


def line(row: Row) -> str:
    """A row as the table shows it."""
    numbers = (row.prefill, row.decode, row.prefix_hit, row.pulled_block)
    cells = "".join(f"{number:12.2e}" for number in numbers)
    own = f"{row.reference_bf16:10.2e}" if row.dtype == "bfloat16" else f"{'':10}"
    return f"{row.family:14}{row.weights:17}{row.dtype:9}{row.backend:20}{cells}{row.largest_logit:9.1f}{own}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every family, print the table, write what there is of it as JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=[*MODELS, DEFAULT_MODEL], nargs="*")
    parser.add_argument("--output", type=Path, help="JSON; default: the stored results, or none with --family")
    arguments = parser.parse_args(argv)
    output = arguments.output or (None if arguments.family else RESULT_FILE)
    configure_logging("bench", "families", "ERROR")
    heads = "".join(f"{head:>12}" for head in ("prefill", "decode", "prefix hit", "pulled"))
    print(f"{'family':14}{'weights':17}{'dtype':9}{'backend':20}{heads}{'logit':>9}{'its own':>10}")
    rows: list[Row] = []
    for name in arguments.family or [*MODELS, DEFAULT_MODEL]:
        with tempfile.TemporaryDirectory() as folder:
            for row in default_model_rows() if name == DEFAULT_MODEL else family_rows(name, Path(folder)):
                rows.append(row)
                print(line(row), flush=True)
        if output is not None:
            write_result(output, rows)


def write_result(path: Path, rows: Sequence[Row]) -> None:
    """The rows and what they were measured with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    path.write_text(
        json.dumps(
            {
                "command": "python -m bench.families",
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "commit": commit.stdout.strip(),
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "reference": "transformers, float32, eager attention",
                "pull": "UCX between two pools, headers and checksums verified",
                "rows": [asdict(row) for row in rows],
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
    # UCX's own teardown at interpreter exit can hang.
    sys.stdout.flush()
    os._exit(0)
