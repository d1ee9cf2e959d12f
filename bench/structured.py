"""What forms of answers cost, on a running mesh: `python -m bench.structured --url http://127.0.0.1:8080`.

First the throughput of concurrent streams with a schema and without, the same number of tokens each: the schema is of
a list that is longer than any answer; rounds come in pairs, the first of a pair taking turns, so that whatever else the
machine does meets both alike, and of the pairs' ratios the median counts. Then the time between two tokens of as many
plain streams, calm and beside forms that cannot be compiled within the limits (structured_pace.py).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.load import Figures, Workload, medians, prompts, run_round
from bench.load_http import http_load
from bench.structured_pace import Load, measure, report
from services.common.models import DEFAULT_MODEL

_FREE = {"ignore_eos": True}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_HELD = {"ignore_eos": False, "guided_json": {"type": "array", "items": _PERSON, "minItems": 1000}}
_CHOICES: dict[str, Mapping[str, Any]] = {"free": _FREE, "schema": _HELD}


async def throughput(arguments: argparse.Namespace) -> None:
    """Medians of the rounds, free and held, and of the ratio of two."""
    workload = Workload("structured", 0, 32, arguments.tokens)
    source = prompts(workload, random.Random(arguments.seed))
    rounds: dict[str, list[Figures]] = {name: [] for name in _CHOICES}
    figures = {}
    for number in range(arguments.rounds):
        for name, extra in sorted(_CHOICES.items(), reverse=number % 2 == 1):
            async with http_load(arguments.url, arguments.model, extra=extra) as load:
                rounds[name].append(
                    await run_round(
                        load.send,
                        source,
                        workload=workload,
                        concurrency=arguments.concurrency,
                        count=2 * arguments.concurrency,
                    )
                )
    for name, taken in rounds.items():
        figures[name] = medians(taken)
        one = figures[name]
        print(
            f"{name:>7}: {one.output_tokens_per_s:.1f} tokens/s, "
            f"TPOT p50 {one.tpot_p50_ms:.2f} ms, TTFT p50 {one.ttft_p50_ms:.1f} ms"
        )
    pairs = zip(rounds["schema"], rounds["free"], strict=True)
    shares = sorted(held.output_tokens_per_s / free.output_tokens_per_s for held, free in pairs)
    print(f"with the schema {_spread(shares)} of the throughput without")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


async def run(arguments: argparse.Namespace) -> None:
    """Both parts."""
    if arguments.rounds:
        await throughput(arguments)
    if arguments.pace_rounds:
        load = Load(arguments.model, arguments.concurrency, arguments.pace_tokens)
        for line in report(await measure(arguments.url, load, arguments.pace_rounds)):
            print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises what a server that does not answer as it should makes of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of a mesh's HTTP API")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="public name of the model")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each, for the throughput")
    parser.add_argument("--rounds", type=int, default=5, help="pairs for the throughput; 0: none")
    parser.add_argument("--pace-rounds", type=int, default=10, help="rounds for the time between tokens; 0: none")
    parser.add_argument("--pace-tokens", type=int, default=384, help="output tokens of each stream in these")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    asyncio.run(run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
