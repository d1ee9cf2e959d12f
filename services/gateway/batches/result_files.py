"""The files that a batch ends with: each line once and in order, in the output file or in that of errors. Blocking."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.durable import temporary_beside
from services.gateway.batches.input_lines import InputLines
from services.gateway.batches.layout import output_file_id
from services.gateway.batches.line_run import unanswered_line
from services.gateway.batches.records import (
    BATCH_OUTPUT,
    CANCELLED,
    EXPIRED,
    BatchRecord,
    BatchUsage,
    FileRecord,
    Final,
)
from services.gateway.batches.result_log import Answer, Results, Superseded, log_path

_UNANSWERED = {
    EXPIRED: ("batch_expired", "This request was not answered before the batch expired."),
    CANCELLED: ("batch_cancelled", "This request was not answered before the batch was cancelled."),
}
_OUTPUT, _ERROR = "output", "error"
# The event loop has its turn between so many lines.
_LINES_AT_A_TIME = 32
_PAUSE_S = 0.0005


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached = msgspec.field(default_factory=_Cached)


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


def finish(
    store: BatchStore, record: BatchRecord, lines: InputLines, results: Results, status: str, now_s: float
) -> Final:
    """Make the files of a run whose lines have ended, and end its batch. now_s: Unix time.

    Raises OSError, and Superseded where another run has ended it or has taken it over.
    """
    store.note_finalizing(record, now_s)
    generation = results.generation
    results.refresh()
    if results.generation != generation:
        # The files of a later generation are for its own run to make, and to remove.
        raise Superseded
    made = _ResultFiles(store, record, results)
    try:
        made.write(lines, status)
        final = made.final(status, len(lines), now_s)
        if not store.finish(record, final):
            raise Superseded
    except BaseException:
        # The batch may have ended before what went wrong: with these files, then they stay.
        ended = store.final(record)
        if ended is None or not made.are_of(ended):
            made.discard(results.generation)
        raise
    for older in range(1, results.generation):
        made.discard(older)
    return final


class _ResultFiles:
    """Both files of one generation."""

    def __init__(self, store: BatchStore, record: BatchRecord, results: Results) -> None:
        self._store = store
        self._record = record
        self._results = results
        self._counts = {_OUTPUT: 0, _ERROR: 0}
        self._usage = BatchUsage()
        folder = store.files.layout.files(record.tenant)
        self._written = {kind: temporary_beside(folder / self._id(kind, results.generation)) for kind in self._counts}

    def write(self, lines: InputLines, status: str) -> None:
        """Write every line."""
        with ExitStack() as stack:
            outs = {kind: stack.enter_context(_new_file(path)) for kind, path in self._written.items()}
            logs = _Logs(self._results, stack)
            for number in range(len(lines)):
                if number % _LINES_AT_A_TIME == 0:
                    time.sleep(_PAUSE_S)
                kind, payload = self._line(logs, lines, number, status)
                outs[kind].write(payload + b"\n")
                self._counts[kind] += 1
            for out in outs.values():
                out.flush()
                os.fsync(out.fileno())

    def final(self, status: str, total: int, now_s: float) -> Final:
        """Make what was written files of the tenant; how the batch ends."""
        return Final(
            status=status,
            at=int(now_s),
            total=total,
            completed=self._counts[_OUTPUT],
            failed=self._counts[_ERROR],
            output_file_id=self._publish(_OUTPUT, now_s),
            error_file_id=self._publish(_ERROR, now_s),
            usage=self._usage,
        )

    def are_of(self, final: Final) -> bool:
        """Whether the batch has ended with files of this generation."""
        ids = {kind: self._id(kind, self._results.generation) for kind in self._counts}
        return final.output_file_id == ids[_OUTPUT] or final.error_file_id == ids[_ERROR]

    def discard(self, generation: int) -> None:
        """Remove the files of a generation that has not ended the batch."""
        for kind, path in self._written.items():
            path.unlink(missing_ok=True)
            self._store.files.discard(self._record.tenant, self._id(kind, generation))

    def _line(self, logs: _Logs, lines: InputLines, number: int, status: str) -> tuple[str, bytes]:
        answer = self._results.answers.get(number)
        if answer is None:
            code, message = _UNANSWERED[status]
            return _ERROR, unanswered_line(self._record, number, lines.read(number).custom_id, code, message)
        payload = logs.payload(answer)
        if not answer.is_ok:
            return _ERROR, payload
        self._count(msgspec.json.decode(payload, type=_Line).response.body.usage)
        return _OUTPUT, payload

    def _count(self, usage: _Usage) -> None:
        self._usage = BatchUsage(
            self._usage.input_tokens + usage.prompt_tokens,
            self._usage.cached_tokens + usage.prompt_tokens_details.cached_tokens,
            self._usage.output_tokens + usage.completion_tokens,
        )

    def _publish(self, kind: str, now_s: float) -> str | None:
        """The id of the file; None where it would be empty."""
        path = self._written[kind]
        try:
            if not self._counts[kind]:
                return None
            files, file_id = self._store.files, self._id(kind, self._results.generation)
            record = FileRecord(
                id=file_id,
                filename=f"{self._record.id}_{kind}.jsonl",
                purpose=BATCH_OUTPUT,
                bytes=path.stat().st_size,
                created_at=int(now_s),
                expires_at=int(now_s + files.limits.life_s),
            )
            files.add(self._record.tenant, record, path)
            return file_id
        finally:
            path.unlink(missing_ok=True)

    def _id(self, kind: str, generation: int) -> str:
        return output_file_id(self._record.id, generation, kind)


class _Logs:
    """The logs of a batch, opened as they are needed and closed with the stack."""

    def __init__(self, results: Results, stack: ExitStack) -> None:
        self._results = results
        self._stack = stack
        self._open: dict[int, BinaryIO] = {}

    def payload(self, answer: Answer) -> bytes:
        """The text of an answer."""
        if answer.generation not in self._open:
            path = log_path(self._results.folder, answer.generation)
            self._open[answer.generation] = self._stack.enter_context(path.open("rb"))
        file = self._open[answer.generation]
        file.seek(answer.offset)
        return file.read(answer.length)


def _new_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
