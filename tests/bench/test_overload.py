"""What the overload bench makes of answers, and that refusals of a real HTTP server are read whole."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.load import Timing
from bench.load_http import RequestFailedError, http_load
from bench.overload_load import Answer, Objectives, Shape, Source, attempt, open_loop, outcome

GOOD, LATE, SLOW = Timing(0.5, 1.5, 11, 0), Timing(3.0, 4.0, 11, 0), Timing(0.5, 9.5, 10, 0)
REFUSAL = b'HTTP/1.1 %d Busy\r\nRetry-After: 7\r\ncontent-length: 13\r\n\r\n{"error": {}}'


def test_goodput_counts_what_met_both_objectives() -> None:
    answers = [Answer("a", timing) for timing in (GOOD, GOOD, LATE, SLOW)]
    answers += [Answer("a", None, 503, 7.0), Answer("a", None, 429), Answer("a", None, 500, 1.0)]
    figures = outcome(answers, Objectives(ttft_s=2.0, tpot_s=0.2), 4.0)
    assert (figures.sent, figures.served, figures.goodput_rps, figures.kept) == (7, 4, 0.5, 0.5)
    assert figures.refused == {503: 1, 429: 1, 500: 1}
    assert figures.without_retry_after == 2
    assert figures.ttft_p99_s == pytest.approx(3.0, abs=0.1)
    assert outcome([], Objectives(1, 1), 1.0).kept == 1.0


async def test_arrivals_are_as_many_as_the_rates_say_however_long_answers_take() -> None:
    async def send(prompt: object, output_tokens: int) -> Timing:
        await asyncio.sleep(0.3)
        return GOOD

    sources = [Source("many", send, 300.0), Source("few", send, 30.0)]
    answers = await open_loop(sources, Shape(4, 2), 0.5, random.Random(1))
    counts = [sum(answer.source == source.name for answer in answers) for source in sources]
    assert 100 < counts[0] < 200
    assert 5 < counts[1] < 30


async def test_a_refusal_s_status_and_retry_after_are_known() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REFUSAL % 503)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, http_load(f"http://127.0.0.1:{port}", "m") as load:
        answer = await attempt(Source("a", load.send, 1.0), Shape(4, 2), random.Random(1))
    assert answer == Answer("a", None, 503, 7.0)
    assert RequestFailedError("gone").status == 0
