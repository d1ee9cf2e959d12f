"""The figures of the load generator, and its HTTP client against a real server that streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.load import Figures, Timing, Workload, figures, medians, percentile, prompts, run_round
from bench.load_http import HttpLoad, RequestFailedError, http_load
from tests.support.waiting import eventually

WORKLOAD = Workload("w", 32, 16, 4)
ANSWER = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
USAGE = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 32}}


def test_prompts_share_what_they_should() -> None:
    first, second = itertools.islice(prompts(WORKLOAD, random.Random(1)), 2)
    assert (len(first), len(second)) == (48, 48)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


@pytest.mark.parametrize(("fraction", "value"), [(0, 1), (0.5, 2.5), (0.99, 3.97), (1, 4)])
def test_percentiles_lie_between_ranks(fraction: float, value: float) -> None:
    assert percentile([1, 2, 3, 4], fraction) == pytest.approx(value)


def test_figures_of_a_round() -> None:
    made = figures([Timing(0.1, 0.4, 4, 32), Timing(0.3, 0.6, 4, 0)], wall_s=2)
    assert made.ttft_p50_ms == pytest.approx(200)
    assert made.tpot_p50_ms == pytest.approx(100)
    assert made.output_tokens_per_s == pytest.approx(4)
    assert made.cached_tokens == 16


def test_medians_are_taken_field_by_field() -> None:
    rounds = [Figures(1, 9, 2, 5, 0), Figures(3, 7, 1, 6, 0), Figures(2, 8, 3, 4, 0)]
    assert medians(rounds) == Figures(2, 8, 2, 5, 0)


async def test_a_round_keeps_its_clients_busy() -> None:
    running = most = sent = 0

    async def send(prompt: Sequence[int], output_tokens: int) -> Timing:
        nonlocal running, most, sent
        running, sent = running + 1, sent + 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Timing(0.1, 0.2, output_tokens, 0)

    await run_round(send, prompts(WORKLOAD, random.Random(1)), workload=WORKLOAD, concurrency=3, count=10)
    assert (most, sent) == (3, 10)


@asynccontextmanager
async def server(
    pieces: Sequence[bytes],
    status: str = "200 OK",
    *,
    bodies: list[dict[str, Any]] | None = None,
    idle_s: float = 60.0,
) -> AsyncIterator[str]:
    """Streams `pieces` as chunks to every request on a connection; notes what was asked. Closes it after `idle_s`."""
    bodies = [] if bodies is None else bodies
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        end = ended[-1]
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
                for piece in pieces:
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()
            end.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.wait() for one in ended))


def last(usage: dict[str, object]) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


async def test_a_stream_is_timed_and_its_usage_read() -> None:
    async with server([b": wait\n\n", ANSWER, ANSWER, last(USAGE)]) as url, http_load(url, "m") as load:
        for _ in range(2):
            timing = await load.send([1, 2, 3], 4)
            assert (timing.output_tokens, timing.cached_tokens) == (4, 32)
            assert 0.02 <= timing.ttft_s < timing.last_token_s


async def test_a_connection_closed_while_idle_is_not_used_again() -> None:
    async with server([ANSWER, last(USAGE)], idle_s=0.5) as url, http_load(url, "m") as load:
        for _ in range(2):
            assert (await load.send([1], 4)).output_tokens == 4
            await eventually(lambda: all(reader.at_eof() for reader, _ in load._idle))


async def test_a_server_without_usage_says_that_all_came() -> None:
    end = [
        b'data: {"choices":[{"text":"","finish_reason":"%s"}]}\n\ndata: [DONE]\n\n' % how
        for how in (b"length", b"stop")
    ]
    bodies: list[dict[str, Any]] = []
    extra = {"stream_options": None, "logit_bias": {"2": -100}}
    async with server([ANSWER, end[0]], bodies=bodies) as url:
        async with http_load(url, "m", encode=lambda ids: " ".join(map(str, ids)), extra=extra) as load:
            timing = await load.send([1, 2], 7)
    assert (timing.output_tokens, timing.prompt_tokens) == (7, 0)
    assert bodies[0]["prompt"] == "1 2"
    assert bodies[0].items() >= extra.items()
    async with server([ANSWER, end[1]]) as url, http_load(url, "m") as load:
        with pytest.raises(RequestFailedError, match="stop"):
            await load.send([1, 2], 7)


async def test_a_refusal_is_told_on_one_line() -> None:
    async with server([b'{"error":\n{"message":"no"}}'], "401 Unauthorized") as url, http_load(url, "m") as load:
        with pytest.raises(RequestFailedError) as raised:
            await load.send([1], 1)
    assert str(raised.value).startswith('HTTP/1.1 401 Unauthorized {"error":')
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [([b'{"error":{"message":"no"}}'], "503 Service Unavailable"), ([ANSWER, b'data: {"error":{}}\n\n'], "200 OK")],
)
async def test_a_failed_request_is_not_a_figure(pieces: list[bytes], status: str) -> None:
    async with server(pieces, status) as url, http_load(url, "m") as load:
        with pytest.raises(RequestFailedError, match="error"):
            await load.send([1], 4)


def test_only_plain_http_urls() -> None:
    with pytest.raises(ValueError, match="--url=ftp://x"):
        HttpLoad("ftp://x", "m", "")
