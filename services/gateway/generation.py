"""One planned request while it runs: its prompts' streams merged into events of the choices the client sees.

A client's choice index is prompt index * n + choice. A single prompt is read directly; several run side by side, at
most MAX_PARALLEL_PROMPTS at a time, and meet in a bounded queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.v1.common_pb2 import FINISH_REASON_LENGTH, CachedTokens, PromptLogprobs, Usage
from kvmesh.v1.worker_pb2 import WorkerGenerateResponse

from services.gateway.errors import WorkerFailed
from services.gateway.output import LENGTH, STOP, Accepted, ChoiceOutput, Embedded, Event, PromptScores
from services.gateway.placed_stream import PlacedStream
from services.gateway.request import Plan
from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.vocabulary import Vocabulary

MAX_PARALLEL_PROMPTS = 16
_QUEUE_MESSAGES = 64


@dataclass(slots=True, eq=False)
class _PromptRun:
    """One prompt's stream and its choices. num_scored: leading prompt tokens that need no more log probabilities."""

    index: int
    stream: PlacedStream
    choices: list[ChoiceOutput]
    cached_at_admission: int = 0
    usage: Usage | None = None
    cut: bool = False
    num_scored: int = 1

    def handle(self, message: WorkerGenerateResponse) -> list[Event]:
        """Events of one message of the worker."""
        kind = message.WhichOneof("event")
        if kind == "tokens":
            tokens = message.tokens
            choice = self.choices[tokens.choice]
            events = choice.push(tokens.token_ids, tokens.logprobs)
            if choice.finished:
                self.stream.end_choice(tokens.choice)
                self.cut = True
            return events
        if kind == "finish":
            reason = LENGTH if message.finish.reason == FINISH_REASON_LENGTH else STOP
            return self.choices[message.finish.choice].end(reason)
        if kind == "prompt_logprobs":
            return self._scored(message.prompt_logprobs)
        if kind == "embedding":
            # Nothing is drawn, and nothing of a choice is left to come.
            self.choices[0].finished = True
            return [Embedded(self.index, message.embedding.values)]
        if kind == "admitted":
            self.cached_at_admission = message.admitted.cached_tokens
            return [Accepted(message.admitted.worker_id, message.admitted.cached_tokens)]
        self.usage = message.completed.usage
        if not all(choice.finished for choice in self.choices):
            raise WorkerFailed("the worker completed before all choices had ended")
        return []

    def _scored(self, told: PromptLogprobs) -> list[Event]:
        """What is new of it: an attempt after a failure tells all again."""
        news = told.logprobs[self.num_scored - told.first :] if told.first <= self.num_scored else ()
        if not news:
            return []
        first, self.num_scored = self.num_scored, self.num_scored + len(news)
        return [PromptScores(self.index, first, news)]

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted. Choices cut by a stop string do not wait for the worker."""
        return self.usage is not None or (self.cut and all(choice.finished for choice in self.choices))


class Generation:
    """Events of one request. `close` is idempotent and releases all streams."""

    def __init__(self, plan: Plan, vocabulary: Vocabulary, streams: Sequence[PlacedStream]) -> None:
        stops = StopStrings(plan.stop) if plan.stop else None
        stop_tokens = frozenset(plan.stop_token_ids)
        count = plan.num_choices
        self._plan = plan
        self._runs = [
            _PromptRun(i, stream, [ChoiceOutput(i * count + c, vocabulary, stops, stop_tokens) for c in range(count)])
            for i, stream in enumerate(streams)
        ]
        self._left = len(self._runs)
        self._merged: _MergedReads | None = None if self._left == 1 else _MergedReads(self._runs)

    async def read(self) -> list[Event]:
        """The next events; empty when the request has ended. Raises GatewayError."""
        while self._left:
            if self._merged is None:
                run = self._runs[0]
                message = await run.stream.read()
            else:
                run, message = await self._merged.read()
            events = run.handle(message)
            if run.is_over:
                run.stream.finish()
                self._left -= 1
            if events:
                return events
        return []

    @property
    def is_over(self) -> bool:
        """Whether all of its prompts have been answered."""
        return not self._left

    def usage(self) -> Usage:
        """Tokens of the request so far; final at its end."""
        cached = CachedTokens()
        for run in self._runs:
            if run.usage is None:
                cached.local += run.cached_at_admission
            else:
                for tier in ("local", "peer", "ram", "ssd"):
                    setattr(cached, tier, getattr(cached, tier) + getattr(run.usage.cached, tier))
        return Usage(
            prompt_tokens=self._plan.prompt_tokens, output_tokens=sum(map(_output_tokens, self._runs)), cached=cached
        )

    @property
    def is_taken(self) -> bool:
        """Whether a worker has admitted any of its prompts."""
        return any(run.stream.is_taken for run in self._runs)

    @property
    def accelerator_s(self) -> float:
        """Time of engines' steps that its ended attempts have told of; all of it once it is closed."""
        return sum(run.stream.job.accelerator_s for run in self._runs)

    @property
    def route_s(self) -> float:
        """Seconds spent waiting for placements, the longest of the prompts."""
        return max(run.stream.route_s for run in self._runs)

    @property
    def worker_id(self) -> str:
        """The worker of the first prompt."""
        return self._runs[0].stream.worker_id

    def close(self) -> None:
        """Cancel what still runs."""
        if self._merged is not None:
            self._merged.close()
        for run in self._runs:
            run.stream.close()


def _output_tokens(run: _PromptRun) -> int:
    """The worker's count, unless the gateway cut a choice short of it."""
    if run.usage is not None and not run.cut:
        return run.usage.output_tokens
    return sum(choice.num_tokens for choice in run.choices)


class _MergedReads:
    """Reads several prompts' streams, some at a time, into one bounded queue."""

    def __init__(self, runs: Sequence[_PromptRun]) -> None:
        self._queue: asyncio.Queue[tuple[_PromptRun, WorkerGenerateResponse | Exception]] = asyncio.Queue(
            _QUEUE_MESSAGES
        )
        self._slots = asyncio.Semaphore(MAX_PARALLEL_PROMPTS)
        self._tasks = [asyncio.create_task(self._pump(run)) for run in runs]

    async def read(self) -> tuple[_PromptRun, WorkerGenerateResponse]:
        """The next message of any prompt that is not over. Raises the error of the first prompt that fails."""
        while True:
            run, message = await self._queue.get()
            if isinstance(message, Exception):
                raise message
            if not run.is_over:
                return run, message

    def close(self) -> None:
        """Stop reading."""
        for task in self._tasks:
            task.cancel()

    async def _pump(self, run: _PromptRun) -> None:
        async with self._slots:
            try:
                while not run.is_over:
                    message = await run.stream.read()
                    await self._queue.put((run, message))
                    if message.HasField("completed"):
                        return
            except Exception as error:  # whatever it is, the reader must not wait for ever
                await self._queue.put((run, error))
            except asyncio.CancelledError:
                # `finish` of a stream that was cut ends a read in progress; that is no cancellation of ours.
                if not run.is_over:
                    raise
