"""What is asked of the simulated cluster: requests of a recorded trace, spread, compressed and repeated as wanted.

Reads the Mooncake form (JSON lines with `hash_ids`, each id a 512-token block and all before it), the agent form (JSON
lines with `session`, `keep`, `append`, `output`: texts, here four characters a token) and the Azure form (CSV without
prefixes); all may be gzipped. Block ids only stand for content: they are no digests.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from services.common.blocks import BLOCK_TOKENS, BlockId

MOONCAKE_BLOCK_TOKENS = 512
_CHARACTERS_PER_TOKEN = 4
# Mooncake's arrivals are rounded to about this.
_GROUP_S = 3.0
_START = "%Y-%m-%d %H:%M:%S.%f"


class TraceError(Exception):
    """The file is no trace; one line says why."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """block_ids: of the prompt's full blocks. session: requests of one follow each other, "" for none."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[BlockId, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; of a session the later ones come when the one before has ended, at the earliest."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for each other."""
        return any(request.session for request in self.requests)


def read_trace(path: Path, *, seed: int = 0) -> Trace:
    """The trace in a file. seed: of the draw that spreads arrivals recorded as simultaneous. Raises TraceError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode()
        if text.startswith("TIMESTAMP,"):
            return _azure(csv.DictReader(io.StringIO(text)))
        rows = [json.loads(line) for line in text.splitlines() if line]
        if rows and "hash_ids" in rows[0]:
            return _mooncake(rows, Random(seed))
        if rows and "keep" in rows[0]:
            return _agent(rows)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from None
    raise TraceError(f"{path}: neither a Mooncake, an agent nor an Azure trace")


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The trace's first and second half, each from time 0 on; sessions stay whole, in the half of their beginning."""
    leaders = _starts(trace)
    middle = sorted(leaders.values())[len(leaders) // 2]
    keys = [request.session or str(index) for index, request in enumerate(trace.requests)]
    first = [r for key, r in zip(keys, trace.requests, strict=True) if leaders[key] < middle]
    second = [r for key, r in zip(keys, trace.requests, strict=True) if leaders[key] >= middle]
    return replace(trace, requests=_from_zero(first)), replace(trace, requests=_from_zero(second))


def compress(trace: Trace, load: float) -> Trace:
    """Arrivals `load` times as dense; inside a session the gaps stay, only the sessions begin closer together."""
    starts = _starts(trace)
    requests = [
        replace(request, arrival_s=request.arrival_s - start_s * (1.0 - 1.0 / load))
        for index, request in enumerate(trace.requests)
        for start_s in (starts[request.session or str(index)],)
    ]
    return replace(trace, requests=tuple(sorted(requests, key=_arrival)))


def repeat(trace: Trace, copies: int, *, seed: int = 0) -> Trace:
    """The sessions `copies` times, as by other users: begun at other times, sharing only what sessions share anyway."""
    shared = _shared_blocks(trace)
    random = Random(seed)
    starts = _starts(trace)
    span_s = max(starts.values(), default=0.0)
    requests = list(trace.requests)
    for copy in range(1, copies):
        begun = {session: random.uniform(0.0, span_s) for session in starts}
        salt = copy.to_bytes(8, "little")
        for index, request in enumerate(trace.requests):
            key = request.session or str(index)
            requests.append(
                replace(
                    request,
                    arrival_s=request.arrival_s - starts[key] + begun[key],
                    session=request.session and f"{request.session}/{copy}",
                    block_ids=tuple(
                        id_ if id_ in shared else BlockId(blake2b(id_ + salt, digest_size=16).digest())
                        for id_ in request.block_ids
                    ),
                )
            )
    return replace(trace, requests=tuple(sorted(requests, key=_arrival)))


def ideal_hit_tokens(requests: Iterable[TraceRequest], block_tokens: int) -> list[int]:
    """Of each request the tokens that one infinite cache for all would have, as requests arrive."""
    seen: set[BlockId] = set()
    hits = []
    for request in requests:
        usable = request.block_ids[: (request.prompt_tokens - 1) // block_tokens]
        count = next((at for at, id_ in enumerate(usable) if id_ not in seen), len(usable))
        seen.update(request.block_ids)
        hits.append(count * block_tokens)
    return hits


def _arrival(request: TraceRequest) -> float:
    return request.arrival_s


def _starts(trace: Trace) -> dict[str, float]:
    """When each session began; a request without one is a session of its own, by its index."""
    starts: dict[str, float] = {}
    for index, request in enumerate(trace.requests):
        starts.setdefault(request.session or str(index), request.arrival_s)
    return starts


def _from_zero(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    zero_s = requests[0].arrival_s if requests else 0.0
    return tuple(replace(request, arrival_s=request.arrival_s - zero_s) for request in requests)


def _shared_blocks(trace: Trace) -> set[BlockId]:
    """Blocks of more than one session."""
    owner: dict[BlockId, str] = {}
    shared: set[BlockId] = set()
    for index, request in enumerate(trace.requests):
        key = request.session or str(index)
        shared.update(id_ for id_ in request.block_ids if owner.setdefault(id_, key) != key)
    return shared


def _mooncake(rows: Sequence[dict[str, Any]], random: Random) -> Trace:
    requests = [
        TraceRequest(
            arrival_s,
            row["input_length"],
            max(1, row["output_length"]),
            tuple(
                BlockId(number.to_bytes(16, "little"))
                for number in row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK_TOKENS]
            ),
        )
        for row, arrival_s in zip(rows, _spread([row["timestamp"] / 1e3 for row in rows], random), strict=True)
    ]
    return Trace(_from_zero(sorted(requests, key=_arrival)), MOONCAKE_BLOCK_TOKENS)


def _spread(times_s: Sequence[float], random: Random) -> list[float]:
    """Times recorded as one moment, spread to the next recorded one, 3 s at most; their order stays."""
    distinct = sorted(set(times_s))
    gaps = {
        t: min(_GROUP_S, later - t) for t, later in zip(distinct, [*distinct[1:], distinct[-1] + _GROUP_S], strict=True)
    }
    drawn: dict[float, list[float]] = {}
    for t in times_s:
        drawn.setdefault(t, []).append(t + random.random() * gaps[t])
    queues = {t: iter(sorted(values)) for t, values in drawn.items()}
    return [next(queues[t]) if len(drawn[t]) > 1 else t for t in times_s]


def _agent(rows: Sequence[dict[str, Any]]) -> Trace:
    prompts: dict[str, str] = {}
    requests = []
    size = BLOCK_TOKENS * _CHARACTERS_PER_TOKEN
    for row in rows:
        session = str(row["session"])
        prompt = prompts[session] = prompts.get(session, "")[: row["keep"]] + row["append"]
        tokens = max(1, -(-len(prompt) // _CHARACTERS_PER_TOKEN))
        ids: list[BlockId] = []
        parent = b""
        for at in range(len(prompt) // size):
            text = prompt[at * size : (at + 1) * size].encode()
            parent = blake2b(parent + text, digest_size=16).digest()
            ids.append(BlockId(parent))
        output = max(1, -(-len(row["output"]) // _CHARACTERS_PER_TOKEN))
        requests.append(TraceRequest(row["t_us"] / 1e6, tokens, output, tuple(ids), session))
    return Trace(_from_zero(sorted(requests, key=_arrival)), BLOCK_TOKENS)


def _azure(rows: Iterable[dict[str, str]]) -> Trace:
    requests = [
        TraceRequest(
            datetime.strptime(row["TIMESTAMP"][:26], _START).timestamp(),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for row in rows
    ]
    return Trace(_from_zero(sorted(requests, key=_arrival)), BLOCK_TOKENS)
