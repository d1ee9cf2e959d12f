"""What one attempt's caller is told: the engine's events as responses, and a note of how the attempt ended."""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog
from kvmesh.v1 import worker_pb2
from opentelemetry import context as otel_context

from services.common.release import PROTOCOL
from services.worker.convert import chunk_proto, completed_proto, finish_proto, load_proto, move_proto, scores_proto
from services.worker.front import Front
from services.worker.messages import (
    AdmittedRequest,
    ChoiceOutput,
    MoveRequested,
    PreparedRequest,
    PromptAdvanced,
    PromptEmbedded,
    PromptScored,
    RequestFailed,
    RequestUsage,
    StaleRequest,
)
from services.worker.observation import record_spans
from services.worker.streams import Event

_log = structlog.get_logger()


class Exchange:
    """Turns the events of one stream into responses. Make it in the caller's context: spans and log lines join it."""

    def __init__(self, request: worker_pb2.WorkerGenerateRequest, front: Front, worker_id: str) -> None:
        self.is_over = False
        self.failure: RequestFailed | None = None
        self._names = attempt_names(request)
        self._front = front
        self._worker_id = worker_id
        # Readers of one that is kept are told what others draw in the order in which it is told here.
        self._draws_beside = front.is_exact and not request.keep_s
        self._parent = otel_context.get_current()
        self._submitted_ns = time.time_ns()

    def responses(self, events: list[Event]) -> Iterator[worker_pb2.WorkerGenerateResponse]:
        """Responses for a batch of events; tokens of one choice that wait together go together, but for gaps."""
        for run in _runs(events):
            outputs = [event for event in run if isinstance(event, ChoiceOutput)]
            if outputs:
                yield chunk_proto(outputs)
                if outputs[-1].finish:
                    yield finish_proto(outputs[-1])
            else:
                yield from self._other(run[0])

    def _other(self, event: Event) -> Iterator[worker_pb2.WorkerGenerateResponse]:
        match event:
            case AdmittedRequest(cached_tokens=cached_tokens):
                admitted = worker_pb2.Admitted(
                    worker_id=self._worker_id, cached_tokens=cached_tokens, protocol=PROTOCOL
                )
                yield worker_pb2.WorkerGenerateResponse(admitted=admitted)
            case PreparedRequest(pull_s=pull_s, compute_s=compute_s):
                prepared = worker_pb2.Prepared(
                    takes_more=True, pull_s=pull_s, compute_s=compute_s, draws_beside=self._draws_beside
                )
                yield worker_pb2.WorkerGenerateResponse(prepared=prepared)
            case MoveRequested():
                yield move_proto(event)
            case PromptAdvanced():
                yield worker_pb2.WorkerGenerateResponse(prompt_advanced=worker_pb2.PromptAdvanced())
            case PromptScored():
                yield scores_proto(event)
            case PromptEmbedded(values=values):
                yield worker_pb2.WorkerGenerateResponse(embedding=worker_pb2.Embedding(values=values))
            case StaleRequest():
                self.is_over = True
                self._front.metrics.ended("stale")
                stale = worker_pb2.Stale(load=load_proto(self._front.board))
                yield worker_pb2.WorkerGenerateResponse(stale=stale)
            case RequestFailed():
                self.is_over = True
                self.failure = event
                self._front.metrics.ended(event.code.lower())
                _log.info("request failed", code=event.code, **self._names)
            case RequestUsage():
                self.is_over = True
                self._complete(event)
                yield completed_proto(event)

    def _complete(self, usage: RequestUsage) -> None:
        self._front.metrics.finished(usage)
        record_spans(usage, parent=self._parent, submitted_ns=self._submitted_ns, ended_ns=time.time_ns())
        _log.info(
            "request completed",
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_local=usage.cached_local,
            cached_remote=usage.cached_peer + usage.cached_ram + usage.cached_ssd,
            queue_s=round(usage.queue_s, 4),
            pull_s=round(usage.pull_s, 4),
            prefill_s=round(usage.prefill_s, 4),
            **self._names,
        )


def attempt_names(request: worker_pb2.WorkerGenerateRequest) -> dict[str, object]:
    """For log lines."""
    return {"request_id": request.request_id, "attempt": request.attempt}


def _runs(events: list[Event]) -> Iterator[list[Event]]:
    """Consecutive outputs of a choice together; any other event, and output after a gap, by itself."""
    run: list[Event] = []
    for event in events:
        if run and not _goes_on(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _goes_on(before: Event, event: Event) -> bool:
    if not (isinstance(before, ChoiceOutput) and isinstance(event, ChoiceOutput)):
        return False
    return event.choice == before.choice and event.position == before.position + len(before.token_ids)
