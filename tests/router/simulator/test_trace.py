"""Reading and reshaping traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from services.router.simulator.trace import (
    Trace,
    TraceError,
    TraceRequest,
    compress,
    halves,
    ideal_hit_tokens,
    read_trace,
    repeat,
)
from tests.router.simulator.scenes import BLOCK, block_ids, random_trace, trace


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def test_mooncake_ids_become_blocks_and_groups_are_spread(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": t, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, n]}
        for n, t in enumerate((0, 0, 0, 3000, 6000), start=2)
    ]
    read = read_trace(write(tmp_path / "t.jsonl.gz", rows))
    times = [request.arrival_s for request in read.requests]
    assert times == sorted(times)
    assert len(set(times)) == 5
    assert times[2] <= times[3] - times[0] + 3.0
    assert read.block_tokens == 512
    # The partial last block has no id.
    assert {len(request.block_ids) for request in read.requests} == {2}
    assert len({request.block_ids for request in read.requests}) == 1


def test_agent_sessions_share_the_blocks_of_what_they_keep(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"t_us": 0, "session": "a", "keep": 0, "append": "x" * 640, "output": "y" * 9},
        {"t_us": 2_000_000, "session": "a", "keep": 640, "append": "z" * 64, "output": "y"},
        {"t_us": 3_000_000, "session": "b", "keep": 0, "append": "x" * 320, "output": "y"},
    ]
    first, second, other = read_trace(write(tmp_path / "t.jsonl.gz", rows)).requests
    assert (first.prompt_tokens, first.output_tokens, len(first.block_ids)) == (160, 3, 10)
    assert second.block_ids[:10] == first.block_ids
    assert other.block_ids == first.block_ids[:5]
    assert second.session == "a"


def test_azure_has_lengths_and_no_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path).requests
    assert (first.prompt_tokens, first.output_tokens, first.block_ids) == (374, 44, ())
    assert second.arrival_s == pytest.approx(4.314579)


@pytest.mark.parametrize("text", ["", "hello", '{"timestamp": 1}', "[1]"])
def test_what_is_no_trace_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(TraceError, match="t: "):
        read_trace(path)


def test_halves_keep_sessions_whole_and_start_at_zero() -> None:
    requests = [TraceRequest(float(at), 10, 1, (), "ab"[at % 2] + str(at // 4)) for at in range(16)]
    first, second = halves(trace(requests))
    assert len(first.requests) + len(second.requests) == 16
    assert {r.session for r in first.requests}.isdisjoint(r.session for r in second.requests)
    assert first.requests[0].arrival_s == second.requests[0].arrival_s == 0.0


def test_compression_keeps_the_gaps_inside_sessions() -> None:
    requests = [
        TraceRequest(0.0, 10, 1, (), "a"),
        TraceRequest(1.0, 10, 1, (), "a"),
        TraceRequest(10.0, 10, 1),
        TraceRequest(20.0, 10, 1, (), "b"),
        TraceRequest(21.5, 10, 1, (), "b"),
    ]
    times = [request.arrival_s for request in compress(trace(requests), 10.0).requests]
    assert times == pytest.approx([0.0, 1.0, 1.0, 2.0, 3.5])


def test_copies_share_only_what_sessions_share() -> None:
    common = block_ids(1, 2)
    requests = [TraceRequest(float(at), 80, 1, (*common, *block_ids(2 + at, 3)), f"s{at}") for at in range(2)]
    copied = repeat(trace(requests), 3).requests
    assert len(copied) == 6
    assert len({request.session for request in copied}) == 6
    assert {request.block_ids[:2] for request in copied} == {common}
    assert len({request.block_ids[2:] for request in copied}) == 6


def test_the_ideal_is_what_one_endless_cache_would_have() -> None:
    requests = [TraceRequest(0.0, 3 * BLOCK + 1, 1, block_ids(1, 3)), TraceRequest(1.0, 2 * BLOCK, 1, block_ids(1, 2))]
    # The last token of a prompt is always computed.
    assert ideal_hit_tokens(requests, BLOCK) == [0, BLOCK]
    endless = Trace(random_trace(1, 50, rate=1.0).requests, BLOCK)
    hits = ideal_hit_tokens(endless.requests, BLOCK)
    assert all(hit < request.prompt_tokens for hit, request in zip(hits, endless.requests, strict=True))
