"""What forms of answers cost, on a running mesh: `python -m bench.structured --url http://127.0.0.1:8080`.

First the throughput of concurrent streams with a schema and without, the same number of tokens each: the schema is of
a list that is longer than any answer. Then the time between two messages of as many plain streams, while nobody else is
there and while a client asks again and again for forms that cannot be compiled within the limits. Rounds come in pairs,
the first of a pair taking turns, so that whatever else the machine does meets both alike; of the pairs' ratios the
median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from kvmesh.v1 import inference_pb2_grpc
from kvmesh.v1.inference_pb2 import AnswerForm, GenerateRequest

from bench.load import Figures, Workload, medians, percentile, prompts, run_round
from bench.load_http import http_load
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


async def gaps(stub: inference_pb2_grpc.InferenceAsyncStub, arguments: argparse.Namespace) -> list[float]:
    """Seconds between the messages of plain streams, all together."""

    async def stream(seed: int) -> list[float]:
        request = GenerateRequest(
            model=arguments.model, text="Once upon a time", max_tokens=arguments.tokens, ignore_eos=True, seed=seed
        )
        times = [time.perf_counter() async for reply in stub.Generate(request) if reply.HasField("delta")]
        return [after - before for before, after in pairwise(times)]

    found = await asyncio.gather(*(stream(seed) for seed in range(arguments.concurrency)))
    return [gap for one in found for gap in one]


async def disturb(
    stub: inference_pb2_grpc.InferenceAsyncStub, arguments: argparse.Namespace, refused: list[float]
) -> None:
    """Forms that explode, each a new one, until cancelled; notes how long each took to be refused."""
    for number in range(sys.maxsize):
        schema = f'{{"type":"integer","multipleOf":{999_983 + number}}}'
        request = GenerateRequest(model=arguments.model, text="n", max_tokens=1, form=AnswerForm(json_schema=schema))
        start = time.perf_counter()
        try:
            async for _ in stub.Generate(request):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
        refused.append(time.perf_counter() - start)


async def disturbance(arguments: argparse.Namespace) -> None:
    """Percentiles of the gaps, calm and disturbed."""
    found: dict[str, list[list[float]]] = {"calm": [], "beside exploding forms": []}
    refused: list[float] = []
    async with grpc.aio.insecure_channel(urlsplit(arguments.url).netloc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number in range(arguments.pairs):
            for name in sorted(found, reverse=number % 2 == 1):
                hostile = [] if name == "calm" else [asyncio.create_task(disturb(stub, arguments, refused))]
                found[name].append(sorted(await gaps(stub, arguments)))
                for task in hostile:
                    task.cancel()
                await asyncio.gather(*hostile, return_exceptions=True)
    for name, rounds in found.items():
        p50, p99 = (statistics.median(percentile(one, share) for one in rounds) * 1e3 for share in (0.5, 0.99))
        print(f"{name:>22}: gap p50 {p50:.2f} ms, p99 {p99:.2f} ms (medians of the rounds)")
    pairs = zip(found["beside exploding forms"], found["calm"], strict=True)
    ratios = sorted(percentile(one, 0.99) / percentile(other, 0.99) for one, other in pairs)
    print(f"p99 {_spread(ratios)} times the calm one; {len(refused)} refused")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"


async def run(arguments: argparse.Namespace) -> None:
    """Both parts."""
    if arguments.rounds:
        await throughput(arguments)
    if arguments.pairs:
        await disturbance(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises what a server that does not answer as it should makes of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="root of a mesh's HTTP API")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="public name of the model")
    parser.add_argument("--concurrency", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="pairs for the throughput; 0: none")
    parser.add_argument("--pairs", type=int, default=15, help="pairs for the time between messages; 0: none")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    asyncio.run(run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
