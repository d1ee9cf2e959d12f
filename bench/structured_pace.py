"""The time between two tokens of plain streams, while nobody else is there and beside forms that cannot be compiled.

Windows take turns within the streams of a round: in one a client asks for a form that explodes, until it is refused,
and the next is as long, and calm. So both meet the same streams, and whatever else the machine does meets both. A gap
that touches a window with a form counts as one beside it.

The load needs a core itself whenever tokens come. While it waits for one they lie unread and it measures itself, so
that is told beside the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
from kvmesh.v1 import inference_pb2_grpc
from kvmesh.v1.inference_pb2 import AnswerForm, GenerateRequest

from bench.load import percentile

_REFUSAL_TIMEOUT_S = 120.0
_FIRST_CALM_S = 1.0
_FIRST_MULTIPLE = 999_983
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. concurrency: streams at once. tokens: of each."""

    model: str
    concurrency: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Gaps of one round, ascending seconds. waited_share: of the round, for which the load waited for a core."""

    calm: Sequence[float]
    beside: Sequence[float]
    waited_share: float

    @property
    def ratio(self) -> float:
        """p99 beside forms by the calm one."""
        return percentile(self.beside, 0.99) / percentile(self.calm, 0.99)


def split(times: Sequence[Sequence[float]], windows: Sequence[Span], whole: Span) -> tuple[list[float], list[float]]:
    """Gaps between each stream's times within `whole`: those outside all windows, and those that touch one. Ascending
    both.
    """
    gaps = [gap for one in times for gap in pairwise(one) if whole[0] <= gap[0] and gap[1] <= whole[1]]
    calm: list[float] = []
    beside: list[float] = []
    for before, after in gaps:
        touches = any(before < end and after > begin for begin, end in windows)
        (beside if touches else calm).append(after - before)
    return sorted(calm), sorted(beside)


@dataclass(slots=True, eq=False)
class _Round:
    """Plain streams, when their tokens came, and when there was a form beside them."""

    stub: inference_pb2_grpc.InferenceAsyncStub
    load: Load
    schemas: Iterator[str]
    times: list[list[float]] = field(init=False)
    windows: list[Span] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.load.concurrency)]

    async def stream(self, seed: int) -> None:
        """Read one to its end, after which not all are there any more."""
        load = self.load
        request = GenerateRequest(
            model=load.model, text="Once upon a time", max_tokens=load.tokens, ignore_eos=True, seed=seed
        )
        async for reply in self.stub.Generate(request):
            if reply.HasField("delta"):
                self.times[seed].append(time.perf_counter())
                if all(self.times):
                    self.has_begun.set()
        self.is_ending.set()

    async def disturb(self, calm_s: float) -> None:
        """Forms by turns with calm, first one of `calm_s`, for as long as all streams go on."""
        await self.has_begun.wait()
        while not await self._ends_within(calm_s):
            begun_s = time.perf_counter()
            await refusal(self.stub, self.load.model, next(self.schemas))
            self.windows.append((begun_s, time.perf_counter()))
            calm_s = time.perf_counter() - begun_s

    async def _ends_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await self.is_ending.wait()
        return False

    @property
    def whole(self) -> Span:
        """While all streams went on."""
        return max(one[0] for one in self.times), min(one[-1] for one in self.times)


async def measure_round(
    stub: inference_pb2_grpc.InferenceAsyncStub, load: Load, schemas: Iterator[str], *, calm_first: bool
) -> Pace:
    """One round. Raises RuntimeError when it was too short for calm and forms."""
    one = _Round(stub, load, schemas)
    begun_s, waited_s = time.perf_counter(), _waited_s()
    async with asyncio.TaskGroup() as group:
        for seed in range(load.concurrency):
            group.create_task(one.stream(seed))
        group.create_task(one.disturb(_FIRST_CALM_S if calm_first else 0.0))
    share = (_waited_s() - waited_s) / (time.perf_counter() - begun_s)
    calm, beside = split(one.times, one.windows, one.whole)
    if not calm or not beside:
        raise RuntimeError("the streams ended before a form was refused and calm had returned: they need more tokens")
    return Pace(calm, beside, share)


async def refusal(stub: inference_pb2_grpc.InferenceAsyncStub, model: str, schema: str) -> None:
    """Ask for a form that cannot be compiled. Raises RuntimeError when it is not refused."""
    request = GenerateRequest(model=model, text="n", max_tokens=1, form=AnswerForm(json_schema=schema))
    try:
        async for _ in stub.Generate(request, timeout=_REFUSAL_TIMEOUT_S):
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return
        raise
    raise RuntimeError("a form that explodes was taken")


def exploding_schemas() -> Iterator[str]:
    """Each another one, so that no verdict is known already; none has a factor of ten's, which would make it small."""
    return (f'{{"type":"integer","multipleOf":{multiple}}}' for multiple in count(_FIRST_MULTIPLE, 10))


async def measure(url: str, load: Load, num_rounds: int) -> list[Pace]:
    """Rounds that begin by turns with calm and with a form."""
    schemas = exploding_schemas()
    async with grpc.aio.insecure_channel(urlsplit(url).netloc) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        # The first form finds the process that compiles it not started.
        await refusal(stub, load.model, next(schemas))
        return [await measure_round(stub, load, schemas, calm_first=number % 2 == 0) for number in range(num_rounds)]


def report(rounds: Sequence[Pace]) -> Iterator[str]:
    """Lines for a reader."""
    for name, gaps in (
        ("calm", [one.calm for one in rounds]),
        ("beside exploding forms", [one.beside for one in rounds]),
    ):
        p50, p99 = (statistics.median(percentile(one, share) for one in gaps) * 1e3 for share in (0.5, 0.99))
        pooled = percentile(sorted(gap for one in gaps for gap in one), 0.99) * 1e3
        yield f"{name:>22}: gap p50 {p50:.2f} ms, p99 {p99:.2f} ms (medians of the rounds), p99 of all {pooled:.2f} ms"
    ratios = sorted(one.ratio for one in rounds)
    yield f"p99 {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) times the calm one"
    waited = sorted(one.waited_share for one in rounds)
    yield f"the load waited for a core for {statistics.median(waited):.1%} of a round (at most {waited[-1]:.1%})"


def _waited_s() -> float:
    """For how long this thread could have run and had no core."""
    return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
