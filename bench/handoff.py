"""`python -m bench.handoff`: what long prompts do to running streams, with one kind of worker and with two.

Streams run on a mesh of two workers; every second a long prompt arrives that nobody has seen. Measured is the time
between two events of a stream, without the prompts and with them: p99 and the ratio of both, where both workers do all,
and where one computes prompts and the other answers. `--choice` prints, and with `--plot` draws, what a router decides
by load, prompt length and link. The machine's other load is in the figures: say how quiet it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.engine_servers import mesh
from bench.handoff_choice import ACCELERATOR, CPU, Choice, choices, plot
from bench.kv_table import Machine
from bench.load import FIRST_TOKEN_ID, LAST_TOKEN_ID, percentile
from bench.load_http import RequestFailedError, http_load
from services.common.models import DEFAULT_MODEL

_PORT = 18_560
_LAYOUTS = {"both": ("--workers", "2"), "pools": ("--prefill-workers", "1", "--decode-workers", "1")}
# A machine that does not keep up is not given ever more.
_MOST_PROMPTS = 4
_PROMPT_OUTPUT = 8
_WARM_UP_S = 3.0
_STREAMS = (0, 1, 2, 4, 8, 16, 32)
_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Speed of both workers, and of the link between them.
_CASES = {
    "CPU workers, link of 1 GB/s": (CPU, 1e9),
    "CPU workers, link of 10 MB/s": (CPU, 1e7),
    "accelerators, link of 10 GB/s": (ACCELERATOR, 1e10),
    "accelerators, link of 1 GB/s": (ACCELERATOR, 1e9),
}


@dataclass(frozen=True)
class Disturbance:
    """Time between two events of a stream, ms, alone and with prompts; and what became of these."""

    layout: str
    streams: int
    alone_p50_ms: float
    alone_p99_ms: float
    disturbed_p50_ms: float
    disturbed_p99_ms: float
    prompts: int
    left_out: int
    ttft_p50_s: float

    @property
    def ratio(self) -> float:
        """Of the p99s."""
        return self.disturbed_p99_ms / self.alone_p99_ms


def main() -> None:
    """Decide or measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench.handoff", description=__doc__)
    parser.add_argument("--choice", action="store_true", help="what a router decides, without a mesh")
    parser.add_argument("--plot", type=Path, help="an SVG of these decisions")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--every-s", type=float, default=1.0, help="between two prompts")
    parser.add_argument("--layouts", nargs="+", choices=sorted(_LAYOUTS), default=sorted(_LAYOUTS))
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    if options.choice:
        _show_choices(options.plot)
        return
    before = os.getloadavg()[0]
    found = [asyncio.run(_measure(layout, options)) for layout in options.layouts]
    machine = Machine.here()
    _show(found, machine, before)
    if options.json is not None:
        rows = [{**asdict(one), "ratio": one.ratio} for one in found]
        result = {"machine": asdict(machine), "load_before": before, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


async def _measure(layout: str, options: argparse.Namespace) -> Disturbance:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="handoff-") as folder, mesh(Path(folder), _PORT, _LAYOUTS[layout]):
        gaps: list[list[float]] = [[], []]
        phase = [0]
        tasks = [asyncio.create_task(_stream(number, gaps, phase)) for number in range(options.streams)]
        await asyncio.sleep(_WARM_UP_S)
        for one in gaps:
            one.clear()
        await asyncio.sleep(options.seconds)
        phase[0] = 1
        ttfts, left_out = await _offer(options, rng)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    alone, disturbed = (sorted(1e3 * gap for gap in one) for one in gaps)
    return Disturbance(
        layout=layout,
        streams=options.streams,
        alone_p50_ms=percentile(alone, 0.5),
        alone_p99_ms=percentile(alone, 0.99),
        disturbed_p50_ms=percentile(disturbed, 0.5),
        disturbed_p99_ms=percentile(disturbed, 0.99),
        prompts=len(ttfts),
        left_out=left_out,
        ttft_p50_s=percentile(sorted(ttfts), 0.5) if ttfts else float("nan"),
    )


async def _offer(options: argparse.Namespace, rng: random.Random) -> tuple[list[float], int]:
    """Long prompts; times to the first token, and how many were left out as too many were open."""
    ttfts: list[float] = []
    left_out = 0
    async with http_load(f"http://127.0.0.1:{_PORT}", DEFAULT_MODEL) as load, asyncio.TaskGroup() as group:

        async def send(prompt: list[int]) -> None:
            try:
                ttfts.append((await load.send(prompt, _PROMPT_OUTPUT)).ttft_s)
            except RequestFailedError as error:
                print(f"not served: {error}")

        open_prompts: set[asyncio.Task[None]] = set()
        for _ in range(int(options.seconds / options.every_s)):
            if len(open_prompts) < _MOST_PROMPTS:
                prompt = [rng.randrange(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(options.prompt_tokens)]
                task = group.create_task(send(prompt))
                open_prompts.add(task)
                task.add_done_callback(open_prompts.discard)
            else:
                left_out += 1
            await asyncio.sleep(options.every_s)
    return ttfts, left_out


async def _stream(number: int, gaps: list[list[float]], phase: list[int]) -> None:
    """One answer after another; the times between its events go to the list of the present phase."""
    body = {"model": DEFAULT_MODEL, "prompt": f"Story {number}:", "max_tokens": 4000, "stream": True}
    payload = json.dumps({**body, "ignore_eos": True, "temperature": 1.0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: m\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", _PORT)
        writer.write(head.encode() + payload)
        last_s = 0.0
        try:
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now_s = time.perf_counter()
                    if last_s:
                        gaps[phase[0]].append(now_s - last_s)
                    last_s = now_s
        finally:
            writer.close()


def _show(found: list[Disturbance], machine: Machine, load_before: float) -> None:
    table = Table(title=f"Time between two events of a stream. {machine}; load average before: {load_before:.1f}")
    columns = (
        "workers",
        "streams",
        "alone p50 / p99 ms",
        "with prompts",
        "p99 ratio",
        "prompts",
        "left out",
        "TTFT p50 s",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            one.layout,
            str(one.streams),
            f"{one.alone_p50_ms:.0f} / {one.alone_p99_ms:.0f}",
            f"{one.disturbed_p50_ms:.0f} / {one.disturbed_p99_ms:.0f}",
            f"{one.ratio:.2f}",
            str(one.prompts),
            str(one.left_out),
            f"{one.ttft_p50_s:.2f}",
        )
    Console().print(table)


def _show_choices(svg: Path | None) -> None:
    panels: dict[str, list[Choice]] = {
        title: choices(speed, _STREAMS, _LENGTHS, link_bytes_per_s=rate) for title, (speed, rate) in _CASES.items()
    }
    for title, found in panels.items():
        table = Table(title=f"{title}: 2 where prompt and output are at two workers")
        table.add_column("streams", justify="right")
        for length in _LENGTHS:
            table.add_column(str(length), justify="right")
        for count in _STREAMS:
            table.add_row(str(count), *("2" if one.is_pair else "1" for one in found if one.streams == count))
        Console().print(table)
    if svg is not None:
        svg.write_text(plot({title: list(found) for title, found in panels.items()}))


if __name__ == "__main__":
    main()
