"""Where parsing, templating and tokenising run: here when short, in helper processes when long.

The hop to a process costs more than a short prompt's whole preparation, and a long prompt must not hold up the
streams of others (1 MB takes 0.6 s to tokenise). A helper has a time limit by alarm signal, so that a template that
never ends costs one request. Helpers die with this process; a broken pool is replaced and its requests fail.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import msgspec
import structlog

from services.common.models import ModelSource
from services.common.process import die_with_parent
from services.gateway.adapters import Adapters, base_and_adapter
from services.gateway.api.openai_parse import ReplyFormat, parse_openai
from services.gateway.errors import InternalError, InvalidRequest, Overloaded
from services.gateway.planning import Tenant, make_plan
from services.gateway.request import GenerationRequest, Plan
from services.gateway.text.chat_template import strings_of
from services.gateway.text.text_model import TextModel, load_text_models
from services.gateway.tools.offered import ToolOffer, with_tools
from services.gateway.versions import Views, choose, conversation_key, resolved

INLINE_BYTES = 4096
_START_TIMEOUT_S = 60.0
_log = structlog.get_logger("gateway.text")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One preparation. Exactly one of body (OpenAI, with its endpoint) and request (native) is given.

    offer: tools of a native request that are not in it yet.
    model: answers in place of the one that was asked for; empty: nobody does. views: the versions of each name.
    adapters: that may be asked for. aliases: models by their other names.
    """

    views: Views
    adapters: Adapters = {}
    tenant: Tenant
    aliases: dict[str, str] = {}
    endpoint: str = ""
    body: bytes | None = None
    request: GenerationRequest | None = None
    offer: ToolOffer | None = None
    model: str = ""


class Prepared(msgspec.Struct, frozen=True):
    """A plan and, for OpenAI, the format of the answer."""

    plan: Plan
    reply: ReplyFormat | None


class ModelMissing(Exception):
    """The model named by the argument has no tokenizer here or no workers; the catalog knows which."""


class Preparer:
    """Turns jobs into plans with the text models at hand. One in each process."""

    def __init__(self, texts: dict[str, TextModel], block_key: bytes) -> None:
        self.texts = texts
        self._block_key = block_key

    def prepare(self, job: Job) -> Prepared:
        """Raises GatewayError or ModelMissing."""
        reply: ReplyFormat | None = None
        request = job.request
        if job.body is not None:
            request, reply = parse_openai(job.endpoint, job.body)
        assert request is not None
        if job.offer is not None:
            request = with_tools(request, job.offer)
        model = job.model or resolved(request.model, self.texts, job.aliases)
        if not model:
            raise InvalidRequest("model must be given: there is no default model", "model")
        if model != request.model:
            request = msgspec.structs.replace(request, model=model)
        base, adapter = base_and_adapter(request.model, job.views, job.adapters)
        text, versions = self.texts.get(base), job.views.get(base)
        if not versions or text is None:
            raise ModelMissing(request.model)
        view = choose(versions, conversation_key(job.tenant.name, request))
        plan = make_plan(request, text=text, view=view, tenant=job.tenant, block_key=self._block_key, adapter=adapter)
        return Prepared(plan, reply)


class TextPool:
    """Runs a Preparer here and in helper processes."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        preparer: Preparer,
        *,
        block_key: bytes,
        processes: int,
        timeout_s: float,
        call_formats: Mapping[str, str] | None = None,
    ) -> None:
        """call_formats: of models whose format is set, by their names."""
        self._preparer = preparer
        self._processes = processes
        self._timeout_s = timeout_s
        self._initargs = (tuple(sources), dict(call_formats or {}), block_key, os.getpid(), timeout_s)
        self._executor = self._new_executor()
        self.losses = 0

    async def start(self) -> None:
        """Start every helper and wait until each has its tokenizers. Raises RuntimeError when they do not come up."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.gather(*(loop.run_in_executor(self._executor, _warm) for _ in range(self._processes)))
        except (TimeoutError, BrokenProcessPool):
            raise RuntimeError("the gateway's text processes do not start") from None

    async def prepare(self, job: Job) -> Prepared:
        """The plan of a job, here when it is short. Raises GatewayError or ModelMissing."""
        if _size(job) <= INLINE_BYTES:
            return self._preparer.prepare(job)
        prepared: Prepared = await self.call(_prepare, job)
        return prepared

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a module-level function in a helper, where `helper()` gives it the Preparer. Raises GatewayError."""
        executor = self._executor
        try:
            async with asyncio.timeout(self._timeout_s + 5.0):
                return await asyncio.get_running_loop().run_in_executor(executor, _limited, function, args)
        except TimeoutError:
            raise Overloaded("preparing the request took too long") from None
        except BrokenProcessPool:
            if executor is self._executor:
                self.losses += 1
                _log.error("text_processes_lost")
                self._executor = self._new_executor()
            raise InternalError("the request could not be prepared") from None

    def close(self) -> None:
        """End the helpers."""
        helpers = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in helpers:
            process.terminate()
        for process in helpers:
            process.join(timeout=5.0)

    def _new_executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._processes, multiprocessing.get_context("spawn"), initializer=_start_helper, initargs=self._initargs
        )


def _size(job: Job) -> int:
    if job.body is not None:
        return len(job.body)
    request = job.request
    assert request is not None
    texts = sum(map(len, strings_of(request.chat or ()))) + (job.offer.size if job.offer is not None else 0)
    return texts + sum(len(prompt) for prompt in request.prompts)


_helper: Preparer | None = None
_helper_timeout_s = 0.0


def _start_helper(
    sources: tuple[ModelSource, ...], call_formats: dict[str, str], block_key: bytes, parent_pid: int, timeout_s: float
) -> None:
    global _helper, _helper_timeout_s
    die_with_parent(parent_pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _on_alarm)
    _helper_timeout_s = timeout_s
    _helper = Preparer(load_text_models(sources, call_formats), block_key)


def helper() -> Preparer:
    """This helper process's Preparer."""
    assert _helper is not None
    return _helper


def _warm() -> int:
    return len(helper().texts)


def _on_alarm(_number: int, _frame: object) -> None:
    raise InvalidRequest("the request takes too long to parse and tokenise")


def _limited(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    signal.setitimer(signal.ITIMER_REAL, _helper_timeout_s)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _prepare(job: Job) -> Prepared:
    return helper().prepare(job)
