"""`python -m bench.lora`: decoding with low-rank adapters on CPU, against the base model and against merged weights.

Batches of one size, in which no sequence, all with one, or each of 8 or of as many as there are sequences has an
adapter (rank 8, all seven projections), take turns; the table gives tokens/s as the median of the rounds, which share
whatever else the machine does. With --check adapters of a mixed batch are then compared with weights that the adapter
is merged into, all layers, in float32: largest difference of logits, and whether the greedy tokens are the same. The
merged models run in plain torch, the mixed batch on the compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kv_table import Machine
from bench.merged_weights import merged_layer
from bench.random_adapters import write_random_adapter
from services.common.models import DEFAULT_MODEL, resolve_model
from services.worker.model.adapter import AdapterWeights, load_adapter
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.kv_pool import TORCH_DTYPES, KvPool
from services.worker.model.layout import ComputeDtype
from services.worker.model.load import kv_layout, load_runner
from services.worker.model.model_files import open_model
from services.worker.model.native_decoder import NativeDecoder
from services.worker.model.runner import CpuRunner
from services.worker.model.step import StepInput
from services.worker.model.step_check import StepLimits, checked_batch
from services.worker.model.torch_decoder import TorchDecoder
from services.worker.model.weights import ModelWeights, load_weights

RANK = 8
CONTEXT = 32
_PROMPT = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and write them where --json says."""
    parser = argparse.ArgumentParser(prog="python -m bench.lora", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="known name, PATH or NAME=PATH")
    parser.add_argument("--batch", type=int, default=100, help="sequences of the batch, and adapters")
    parser.add_argument("--rounds", type=int, default=5, help="of every kind of batch")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--check", type=int, default=100, help="most adapters compared with merged weights")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    path = resolve_model(arguments.model).path
    with tempfile.TemporaryDirectory() as folder:
        folders = _write_adapters(Path(folder), open_model(path).config, arguments.batch)
        figures = {
            "machine": asdict(Machine.here()),
            "model": arguments.model,
            "rank": RANK,
            "batch": arguments.batch,
            "threads": arguments.threads,
            "bfloat16": _speeds(path, folders, arguments),
        }
        _write(arguments.json, figures)
        if arguments.check:
            _write(arguments.json, {**figures, "merged": _compare(path, folders[: arguments.check])})
    return 0


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _write_adapters(folder: Path, config: ModelConfig, count: int) -> list[Path]:
    return [
        write_random_adapter(folder / str(number), config, seed=number, rank=RANK, dtype=torch.bfloat16)
        for number in range(count)
    ]


def _speeds(path: Path, folders: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of decoding steps by kind of batch, and what a load takes."""
    batch = arguments.batch
    kinds = {
        "base": [-1] * batch,
        "one adapter": [0] * batch,
        "8 adapters": [number % 8 for number in range(batch)],
        f"{batch} adapters": list(range(batch)),
    }
    with _runner(path, "bfloat16", batch, arguments.threads) as runner:
        load_s = _put_all(runner, folders)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(arguments.rounds + 1):
            for name, slots in kinds.items():
                started_s = time.perf_counter()
                runner.submit(_decode_step(slots))
                runner.collect()
                seconds[name].append(time.perf_counter() - started_s)
    figures: dict[str, Any] = {"load_s": round(statistics.median(load_s), 4)}
    base_s = statistics.median(seconds["base"][1:])
    print(f"{'batch':>14}  tokens/s  of base")
    for name, taken in seconds.items():
        # The first round warms up.
        median_s = statistics.median(taken[1:])
        figures[name] = {"tokens_per_s": round(batch / median_s, 1), "of_base": round(base_s / median_s, 3)}
        print(f"{name:>14}  {batch / median_s:8.1f}  {base_s / median_s:7.3f}")
    print(f"loading an adapter: {figures['load_s']:.4f} s (median of {len(folders)})")
    return figures


def _runner(path: Path, dtype: ComputeDtype, slots: int, threads: int) -> CpuRunner:
    layout = kv_layout(open_model(path).config, dtype)
    pool = mmap.mmap(-1, layout.pool_bytes(2 * slots))
    return load_runner(
        path, dtype=dtype, pool_buffer=pool, num_threads=threads, served_context=CONTEXT, adapter_slots=slots
    )


def _put_all(runner: CpuRunner, folders: Sequence[Path]) -> list[float]:
    """Load every adapter into the slot of its number; seconds of each."""
    seconds = []
    table, dtype = runner.decoder.adapters, TORCH_DTYPES[runner.spec.dtype]
    for slot, folder in enumerate(folders):
        started_s = time.perf_counter()
        table.put(slot, table.prepare(load_adapter(folder, runner.spec.config, dtype, max_rank=RANK)))
        seconds.append(time.perf_counter() - started_s)
    return seconds


def _decode_step(slots: Sequence[int]) -> StepInput:
    """A decoding step of sequences with so many tokens before; what the pool holds of them does not matter."""
    count = len(slots)
    every = np.arange(count, dtype=np.int32)
    tables = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    return StepInput(
        token_ids=100 + every,
        positions=np.full(count, _PROMPT, np.int32),
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, _PROMPT + 1, np.int32),
        block_tables=tables,
        logit_rows=every,
        adapters=np.array(slots, np.int32) if max(slots) >= 0 else None,
    )


def _compare(path: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """A mixed batch against one run for each adapter whose weights have it merged in, float32."""
    model = open_model(path)
    config, weights = model.config, load_weights(model.read()[0], model.config, torch.float32)
    adapters = [load_adapter(folder, config, torch.float32, max_rank=RANK) for folder in folders]
    mixed = NativeDecoder(config, weights, _pool(config, len(adapters)), CONTEXT, adapter_slots=len(adapters))
    for slot, adapter in enumerate(adapters):
        mixed.adapters.put(slot, mixed.adapters.prepare(adapter))
    found = _prompt_logits(mixed, list(range(len(adapters))))
    largest, same = 0.0, 0
    for slot, adapter in enumerate(adapters):
        expected = _merged_logits(config, weights, adapter, slot)
        largest = max(largest, (found[slot] - expected).abs().max().item())
        same += int(found[slot].argmax() == expected.argmax())
        print(f"{slot + 1} of {len(adapters)} compared, {same} equal, within {largest:.2e}", file=sys.stderr)
    print(f"merged weights, float32: greedy tokens equal {same} of {len(adapters)}, logits within {largest:.2e}")
    return {"adapters": len(adapters), "greedy_equal": same, "largest_logit_difference": largest}


def _pool(config: ModelConfig, sequences: int) -> KvPool:
    return KvPool.on_device(torch.device("cpu"), kv_layout(config, "float32"), sequences)


def _merged_logits(config: ModelConfig, weights: ModelWeights, adapter: AdapterWeights, seq: int) -> torch.Tensor:
    layers = tuple(map(merged_layer, weights.layers, adapter.layers))
    merged = TorchDecoder(config, replace(weights, layers=layers), _pool(config, 1), CONTEXT)
    return _prompt_logits(merged, None, first=seq)[0]


def _prompt_logits(decoder: Decoder, slots: Sequence[int] | None, *, first: int = 0) -> torch.Tensor:
    """Logits after the prompts of sequences `first` and on, one of each slot, or of one without an adapter."""
    count = 1 if slots is None else len(slots)
    tokens = [17 * (first + seq) + 29 * place + 5 for seq in range(count) for place in range(_PROMPT)]
    starts = np.arange(count + 1, dtype=np.int32) * _PROMPT
    step = StepInput(
        token_ids=np.array(tokens, np.int32),
        positions=np.tile(np.arange(_PROMPT, dtype=np.int32), count),
        query_starts=starts,
        context_lens=np.full(count, _PROMPT, np.int32),
        block_tables=np.arange(count, dtype=np.int32)[:, None],
        logit_rows=starts[1:] - 1,
        adapters=None if slots is None else np.array(slots, np.int32),
    )
    limits = StepLimits(max(tokens) + 1, len(decoder.pool), CONTEXT, decoder.adapters.num_slots)
    return decoder.forward(checked_batch(step, limits), torch.get_num_threads())


if __name__ == "__main__":
    sys.exit(main())
