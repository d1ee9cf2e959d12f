"""Checks grammars in a process of their own, which starts with the first one and is replaced when it has gone.

One grammar is compiled at a time. Its verdict is kept, and shared by requests that bring the same grammar meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import structlog

from services.common.models import ModelSource
from services.gateway.errors import InvalidRequest, Overloaded
from services.gateway.grammars.process import LENGTH, TOO_MUCH, Check, Start
from services.gateway.request import AnswerForm

MAX_WAITING = 256
_MAX_KEPT = 1024
_START_TIMEOUT_S = 60.0
# Of one grammar, on a machine that is too busy to give it the time it may use.
_ANSWER_TIMEOUT_S = 30.0
_log = structlog.get_logger("gateway.grammars")


class GrammarChecker:
    """Owner of the process. `close` ends it."""

    def __init__(self, sources: Sequence[ModelSource], *, max_bytes: int, cpu_s: float, memory_bytes: int) -> None:
        """max_bytes: of a grammar; cpu_s, memory_bytes: that its compilation may take."""
        self._start = Start(os.getpid(), {source.name: str(source.path) for source in sources}, cpu_s, memory_bytes)
        self._max_bytes = max_bytes
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        # By digest: what is wrong with a grammar, "" for nothing.
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[str]] = {}
        # Of the process, and of children that went over their limits.
        self.losses = 0
        self.refusals = 0

    async def check(self, form: AnswerForm, model: str, vocab_size: int) -> None:
        """Raises InvalidRequest for a form that no worker could follow, Overloaded when too many wait to be checked."""
        if len(form.grammar.encode()) > self._max_bytes:
            self.refusals += 1
            raise InvalidRequest(f"{form.field}: larger than {self._max_bytes} bytes", form.field)
        asked = Check(model, vocab_size, form.grammar)
        digest = blake2b(msgspec.json.encode(asked), digest_size=16).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = await self._verdict(digest, asked)
        if verdict:
            for part in form.parts:
                await self.check(part, model, vocab_size)
            self.refusals += 1
            raise InvalidRequest(f"{form.field}: {verdict}", form.field)

    async def close(self) -> None:
        """End the process."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self._end()

    async def _verdict(self, digest: bytes, asked: Check) -> str:
        task = self._asked.get(digest)
        if task is None:
            if len(self._asked) >= MAX_WAITING:
                raise Overloaded("too many grammars wait to be checked")
            # A caller who leaves does not take the answer along, which would be the next one's.
            task = self._asked[digest] = asyncio.create_task(self._ask(digest, asked))
            task.add_done_callback(lambda _: self._asked.pop(digest, None))
        return await asyncio.shield(task)

    async def _ask(self, digest: bytes, asked: Check) -> str:
        async with self._turn:
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    process = self._process or await self._started()
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    verdict = await _exchange(process, msgspec.json.encode(asked))
            except TimeoutError:
                await self._lost("silent")
                raise Overloaded("there was no time to check the grammar") from None
            except (EOFError, ConnectionError):
                await self._lost("ended")
                raise Overloaded("grammars cannot be checked") from None
            except BaseException:
                # An answer that is on its way must not become another's.
                await self._end()
                raise
        if verdict == TOO_MUCH:
            self.losses += 1
            _log.warning("grammar_over_limits")
        self._verdicts[digest] = verdict
        if len(self._verdicts) > _MAX_KEPT:
            self._verdicts.popitem(last=False)
        return verdict

    async def _started(self) -> Process:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway.grammars.process", stdin=PIPE, stdout=PIPE
        )
        try:
            await _exchange(process, msgspec.json.encode(self._start))
        except (EOFError, ConnectionError):
            await self._lost("not started")
            raise Overloaded("grammars cannot be checked") from None
        return process

    async def _lost(self, how: str) -> None:
        self.losses += 1
        _log.warning("grammar_process_lost", how=how)
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            # Process.kill would collect the status of one that has just ended, which `wait` waits for.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def _exchange(process: Process, message: bytes) -> str:
    """Raises EOFError or ConnectionError when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return (await process.stdout.readexactly(size)).decode()
