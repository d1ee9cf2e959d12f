"""How fast a model's files get into memory, verified, against the disk's own speed: `python -m bench.load_model`.

Makes a BF16 Llama of random weights in two shards, seals it, and reads it cold (dropped from the page cache, which
RWF_NOWAIT confirms) and warm. In each round and in turn: the disk alone (O_DIRECT, the same chunks and threads), the
page cache alone, memcpy, SHA-256 alone, this loader, this loader on a model that is not sealed, and what it replaced: a
mapped file read by safetensors and digested by a second pass. Cold figures are those of the disk at that moment; what
both share bounds them: `floor` is the slowest of disk, memcpy and SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.kv_table import Machine
from services.common.artifacts.chunk_reader import CHUNK_BYTES, reading_threads
from services.common.artifacts.manifest import make_manifest, manifest_path, write_manifest
from services.worker.model.model_files import open_model

_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCAB, _HEADS, _KV_HEADS = 20, 2048, 5632, 32_000, 16, 4
_ALIGNMENT = 4096


@dataclass(frozen=True)
class Rate:
    """One way of reading. cold: the files were not in the page cache. gb_per_s: the median round's."""

    name: str
    cold: bool
    gb_per_s: float
    lowest: float
    highest: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.load_model", description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--layers", type=int, default=_LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/load_model.json"))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="load-model-"))
    try:
        machine = Machine.here()
        make_model(folder, arguments.layers)
        size = sum(path.stat().st_size for path in weights(folder))
        rates = measure(folder, size, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rates, size, machine)
    result = {"machine": asdict(machine), "bytes": size, "threads": reading_threads(), "chunk_bytes": CHUNK_BYTES}
    rows = [asdict(rate) for rate in rates]
    arguments.json.write_text(json.dumps({**result, "rounds": arguments.rounds, "rows": rows}, indent=1) + "\n")


def make_model(folder: Path, layers: int) -> None:
    """A Llama folder in two shards, sealed. Its values are random bits without infinities."""
    generator = torch.Generator().manual_seed(1)
    heads, kv = _HIDDEN, _HIDDEN // _HEADS * _KV_HEADS

    def matrix(rows: int, columns: int) -> torch.Tensor:
        bits = torch.randint(0, 2**14, (rows * columns,), generator=generator, dtype=torch.int16)
        return bits.view(torch.bfloat16).view(rows, columns)

    tensors = {"model.embed_tokens.weight": matrix(_VOCAB, _HIDDEN), "model.norm.weight": matrix(1, _HIDDEN)[0]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            *(("self_attn.q_proj", heads, _HIDDEN), ("self_attn.k_proj", kv, _HIDDEN)),
            *(("self_attn.v_proj", kv, _HIDDEN), ("self_attn.o_proj", _HIDDEN, heads)),
            *(("mlp.gate_proj", _INTERMEDIATE, _HIDDEN), ("mlp.up_proj", _INTERMEDIATE, _HIDDEN)),
            ("mlp.down_proj", _HIDDEN, _INTERMEDIATE),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = matrix(1, _HIDDEN)[0]
    names = sorted(tensors)
    placed: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    write_manifest(folder, make_manifest(folder))
    os.sync()


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def weights(folder: Path) -> list[Path]:
    """The shards."""
    return sorted(folder.glob("*.safetensors"))


def measure(folder: Path, size: int, rounds: int) -> list[Rate]:
    """All ways in turn, round by round. Raises RuntimeError when the page cache cannot be dropped."""
    ways: list[tuple[str, bool, Callable[[], int]]] = [
        ("disk, O_DIRECT", True, lambda: read_alone(folder, os.O_DIRECT)),
        ("loader, sealed", True, lambda: load(folder)),
        ("mapped, digested again", True, lambda: mapped_and_digested(folder)),
        ("page cache", False, lambda: read_alone(folder, 0)),
        ("memcpy, one thread", False, lambda: memcpy(size)),
        ("SHA-256 alone", False, lambda: digest_alone(size)),
        ("loader, sealed", False, lambda: load(folder)),
        ("loader, not sealed", False, lambda: load(folder, sealed=False)),
        ("mapped, digested again", False, lambda: mapped_and_digested(folder)),
    ]
    seconds: dict[tuple[str, bool], list[float]] = {(name, cold): [] for name, cold, _ in ways}
    for _ in range(rounds):
        for name, cold, way in ways:
            (drop if cold else warm)(folder)
            started_s = time.perf_counter()
            count = way()
            seconds[name, cold].append((time.perf_counter() - started_s) * size / count)
    return [_rate(name, cold, size, taken) for (name, cold), taken in seconds.items()]


def _rate(name: str, cold: bool, size: int, seconds: list[float]) -> Rate:
    rates = [size / one / 1e9 for one in seconds]
    return Rate(name, cold, *(round(one, 3) for one in (statistics.median(rates), min(rates), max(rates))))


def drop(folder: Path) -> None:
    """Have nothing of the weights in the page cache."""
    for path in weights(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            present = os.preadv(descriptor, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            present = 0
        finally:
            os.close(descriptor)
        if present:
            raise RuntimeError(f"{path} stays in the page cache")


def warm(folder: Path) -> None:
    """Have all of the weights in the page cache."""
    read_alone(folder, 0)


def read_alone(folder: Path, flags: int) -> int:
    """The same chunks by the same number of threads into memory that stays, and nothing else; bytes read."""
    chunks = [(path, at) for path in weights(folder) for at in range(0, path.stat().st_size, CHUNK_BYTES)]
    descriptors = {path: os.open(path, os.O_RDONLY | flags) for path in weights(folder)}
    buffers = [mmap.mmap(-1, CHUNK_BYTES + _ALIGNMENT) for _ in range(reading_threads())]

    def read(buffer: mmap.mmap, mine: list[tuple[Path, int]]) -> int:
        view = memoryview(buffer)[:CHUNK_BYTES]
        return sum(os.preadv(descriptors[path], [view], at) for path, at in mine)

    try:
        with ThreadPoolExecutor(len(buffers)) as pool:
            parts = [chunks[number :: len(buffers)] for number in range(len(buffers))]
            return sum(pool.map(read, buffers, parts))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def load(folder: Path, *, sealed: bool = True) -> int:
    """What a worker does: all tensors in memory, digests computed and compared."""
    manifest = manifest_path(folder)
    hidden = manifest.with_suffix(".hidden")
    if not sealed:
        manifest.rename(hidden)
    try:
        model = open_model(folder)
        source, _ = model.read()
        assert source.names()
        return model.size
    finally:
        if not sealed:
            hidden.rename(manifest)


def mapped_and_digested(folder: Path) -> int:
    """A digest of each file on a thread, then every tensor copied out of the mapped file."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(_digest_file, weights(folder)))
    kept = []
    for path in weights(folder):
        with safe_open(path, framework="pt") as opened:
            kept += [opened.get_tensor(name).clone() for name in opened.keys()]  # noqa: SIM118
    return sum(path.stat().st_size for path in weights(folder))


def _digest_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def memcpy(size: int) -> int:
    """Copies of a chunk into memory that is used again."""
    source, target = bytes(CHUNK_BYTES), memoryview(bytearray(CHUNK_BYTES))
    for _ in range(size // CHUNK_BYTES):
        target[:] = source
    return size // CHUNK_BYTES * CHUNK_BYTES


def digest_alone(size: int) -> int:
    """SHA-256 of chunks that are in memory, on as many threads as the loader has."""
    data = os.urandom(CHUNK_BYTES)
    with ThreadPoolExecutor(reading_threads()) as pool:
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(size // CHUNK_BYTES)))
    return size // CHUNK_BYTES * CHUNK_BYTES


def show(rates: list[Rate], size: int, machine: Machine) -> None:
    """A table, and each loader's figure over its floor."""
    by_name = {(rate.name, rate.cold): rate.gb_per_s for rate in rates}
    print(f"{size / 1e9:.2f} GB, {reading_threads()} threads, chunks of {CHUNK_BYTES >> 20} MiB, {machine}")
    print(f"{'':<26}{'':<6}{'GB/s':>8}{'lowest':>8}{'highest':>9}{'of disk or page cache':>24}{'of floor':>10}")
    for rate in rates:
        base = by_name["disk, O_DIRECT", True] if rate.cold else by_name["page cache", False]
        floor = min(base, by_name["memcpy, one thread", False], by_name["SHA-256 alone", False])
        told = f"{rate.gb_per_s / base:>24.2f}{rate.gb_per_s / floor:>10.2f}"
        line = f"{rate.name:<26}{'cold' if rate.cold else 'warm':<6}{rate.gb_per_s:>8.2f}{rate.lowest:>8.2f}"
        print(f"{line}{rate.highest:>9.2f}{told}")


if __name__ == "__main__":
    main()
