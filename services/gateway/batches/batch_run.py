"""One batch's run by this gateway, from the check of its file to the files of its results.

It begins a generation of results, so whatever ran the batch before writes nothing that counts. Lines are answered as
the pace allows; one that is refused waits for its next turn for as long as the batch lives. It ends when every line
has an answer, when a client cancels it, or when its time is over, and may be given up at any moment: the next run goes
on with the lines that have no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from services.gateway.batches.batch_store import BatchStore
from services.gateway.batches.disk import Disk
from services.gateway.batches.input_lines import InputLine, InputLines, check_lines
from services.gateway.batches.line_run import MAX_FAILURES, LineAnswer, LineRun, error_answer, is_failure, result_line
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.pace import Pace
from services.gateway.batches.records import CANCELLED, COMPLETED, EXPIRED, FAILED, BatchRecord, Checked, Final
from services.gateway.batches.result_files import finish
from services.gateway.batches.result_log import ResultWriter
from services.gateway.batches.turns import Turns
from services.gateway.core import Core
from services.gateway.errors import GatewayError, TooLargeForWorkers, shape_of

# Between looks whether a client has cancelled it, or its time is over.
_LOOK_S = 0.5
_RETRY_S = 1.0
_log = structlog.get_logger("gateway.batches")


@dataclass(frozen=True, slots=True)
class RunParts:
    """What all runs of a gateway share. clock: Unix time. max_requests: lines of a batch. max_lines: in flight."""

    core: Core
    store: BatchStore
    disk: Disk
    metrics: BatchMetrics
    clock: Callable[[], float]
    max_requests: int
    max_lines: int
    lines: asyncio.Semaphore


@dataclass(slots=True, eq=False)
class BatchRun:
    """State of the run."""

    parts: RunParts
    record: BatchRecord
    _turns: Turns = field(init=False)
    _running: set[LineRun] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._turns = Turns(Pace(self.parts.max_lines), self.parts.lines)

    @property
    def num_running(self) -> int:
        """Lines in flight."""
        return self._turns.num_running

    async def run(self) -> None:
        """Until the batch is over. Raises StorageFailed, and Superseded where another run has taken its place."""
        parts, record = self.parts, self.record
        path = parts.store.input(record)
        lines = await parts.disk.run_long(check_lines, path, record.endpoint, parts.max_requests)
        if lines.errors:
            errors = Final(status=FAILED, at=int(parts.clock()), errors=lines.errors)
            await parts.disk.run(parts.store.finish, record, errors)
            self._ended(errors)
            return
        await parts.disk.run(parts.store.note_checked, record, Checked(int(parts.clock()), len(lines)))
        results, writer = await parts.disk.run_long(parts.store.begin, record)
        try:
            if results.generation > 1:
                parts.metrics.taken_over()
            _log.info("batch_begun", batch_id=record.id, tenant=record.tenant, generation=results.generation,
                      lines=len(lines), answered=len(results.answers))  # fmt: skip
            todo = [number for number in range(len(lines)) if number not in results.answers]
            status = await self._until_over(lines, todo, writer)
            await parts.disk.run(writer.check)
            final = await parts.disk.run_long(finish, parts.store, record, lines, results, status, parts.clock())
        finally:
            writer.close()
        self._ended(final)

    def _ended(self, final: Final) -> None:
        self.parts.metrics.ended(final.status)
        _log.info("batch_ended", batch_id=self.record.id, tenant=self.record.tenant, status=final.status,
                  lines=final.total, completed=final.completed, failed=final.failed)  # fmt: skip

    async def _until_over(self, lines: InputLines, todo: list[int], writer: ResultWriter) -> str:
        """Run lines until all are answered, or the batch is to end without; its status then."""
        work = asyncio.create_task(self._answer_all(lines, todo, writer))
        try:
            while True:
                if (status := await self._end()) is not None:
                    for running in self._running:
                        running.abandons = True
                    return status
                done, _ = await asyncio.wait({work}, timeout=_LOOK_S)
                if done:
                    work.result()
                    return COMPLETED
        finally:
            work.cancel()
            await asyncio.wait({work})

    async def _end(self) -> str | None:
        """Why the batch is to end now, if it is."""
        if self.parts.clock() >= self.record.expires_at:
            return EXPIRED
        is_cancelling = await self.parts.disk.run(self.parts.store.is_cancelling, self.record)
        return CANCELLED if is_cancelling else None

    async def _answer_all(self, lines: InputLines, todo: list[int], writer: ResultWriter) -> None:
        # No more of them wait for a turn than may have one.
        held = asyncio.Semaphore(self.parts.max_lines)
        try:
            async with asyncio.TaskGroup() as group:
                for number in todo:
                    await held.acquire()
                    task = group.create_task(self._answer(lines, number, writer))
                    task.add_done_callback(lambda _: held.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, lines: InputLines, number: int, writer: ResultWriter) -> None:
        custom_id, answer = await self._answer_of(lines, number)
        payload = result_line(self.record, number, custom_id, answer)
        await self.parts.disk.run(writer.append, number, payload, is_ok=answer.is_ok)
        self.parts.metrics.line("answered" if answer.is_ok else "wrong")

    async def _answer_of(self, lines: InputLines, number: int) -> tuple[str, LineAnswer]:
        """The line's custom_id, and the answer of the attempt that has one or the error of the last of several."""
        failures = 0
        while True:
            async with self._turns.turn():
                # A line is in memory for as long as it has a turn: all that wait would be many times as much.
                line = await self.parts.disk.run(lines.read, number)
                found = await self._attempt(line, number)
            if isinstance(found, LineAnswer):
                self._turns.answered()
                return line.custom_id, found
            failures += is_failure(found)
            self.parts.metrics.line("failed" if is_failure(found) else "refused")
            if failures >= MAX_FAILURES:
                return line.custom_id, error_answer(found, "")
            del line
            if isinstance(found, TooLargeForWorkers):
                # Others may fit. It is tried again as a router that has just started may not know every worker yet.
                await asyncio.sleep(_retry_after_s(found))
            else:
                self._turns.refused(_retry_after_s(found))

    async def _attempt(self, line: InputLine, number: int) -> LineAnswer | GatewayError:
        """An answer, or why the line may be tried again."""
        run = LineRun(self.parts.core, self.record, number)
        self._running.add(run)
        try:
            # A task of its own: a request's span and log context end with it.
            return await asyncio.create_task(run.answer(line))
        except GatewayError as error:
            return error
        finally:
            self._running.discard(run)


def _retry_after_s(error: GatewayError) -> float:
    return error.retry_after_s or shape_of(error).retry_after_s or _RETRY_S
