"""Grammars are checked in a process of their own, hostile ones among them, before anybody is asked for a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import jsonschema
import pytest
import pytest_asyncio

from services.common.models import resolve_model
from services.common.release import FIRST_PROTOCOL, GRAMMAR_PROTOCOL, PROTOCOL
from services.gateway.errors import InvalidRequest
from services.gateway.grammars.checker import GrammarChecker
from services.gateway.grammars.formats import json_form, regex_form
from services.gateway.request import AnswerForm
from tests.gateway.conftest import Mesh
from tests.support.schemas import HOSTILE, REFUSED, SCHEMAS
from tests.support.waiting import eventually

MODEL, VOCAB = "smollm2-135m", 49152
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker([resolve_model(MODEL)], max_bytes=2**17, cpu_s=0.5, memory_bytes=2**28)
    yield made
    await made.close()


async def verdict(checker: GrammarChecker, form: AnswerForm) -> str:
    """What is said of a form, "" when it is taken."""
    try:
        await checker.check(form, MODEL, VOCAB)
    except InvalidRequest as refusal:
        return refusal.message if refusal.param == form.field else f"for {refusal.param}"
    return ""


async def test_every_schema_is_taken(checker: GrammarChecker) -> None:
    assert len(SCHEMAS) >= 50
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert await verdict(checker, json_form("f", schema)) == "", name


async def test_what_cannot_be_promised_is_refused_with_its_place(checker: GrammarChecker) -> None:
    for name, (schema, place) in REFUSED.items():
        said = await verdict(checker, json_form("f", schema))
        assert said, name
        assert place in said, name
        assert "\n" not in said


async def test_hostile_schemas_cost_no_more_than_the_limits(checker: GrammarChecker) -> None:
    """Whatever becomes of them, each costs bounded work, and the next request is served."""
    refused = set()
    for name, schema in HOSTILE.items():
        try:
            form = json_form("f", schema)
        except InvalidRequest:
            refused.add(name)
            continue
        if await verdict(checker, form):
            refused.add(name)
    assert {"deep nesting", "exponential intersection", "optional properties", "large multiple"} <= refused
    assert await verdict(checker, json_form("f", {"type": "object"})) == ""


async def test_what_takes_too_long_ends_the_process_and_is_remembered() -> None:
    checker = GrammarChecker([resolve_model(MODEL)], max_bytes=2**16, cpu_s=0.3, memory_bytes=2**28)
    form = json_form("f", HOSTILE["large multiple"])
    together = await asyncio.gather(*(verdict(checker, form) for _ in range(5)))
    assert set(together) == {"f: it takes too long, or too much memory, to compile"}
    assert await verdict(checker, form) == together[0]
    assert (checker.losses, checker.refusals) == (1, 6)
    assert await verdict(checker, json_form("f", {"type": "object"})) == ""
    await checker.close()


def compilers(parent_pid: int) -> set[int]:
    """Children of a process that check grammars, or compile one."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            is_child = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent_pid
            if is_child and b"services.gateway.grammars.process" in (process / "cmdline").read_bytes():
                found.add(int(process.name))
    return found


async def test_grammars_are_compiled_on_cores_that_count_as_free_for_all_others() -> None:
    others = compilers(os.getpid())
    checker = GrammarChecker([resolve_model(MODEL)], max_bytes=2**16, cpu_s=0.5, memory_bytes=2**28)
    assert await verdict(checker, json_form("f", {"type": "object"})) == ""
    (process,) = compilers(os.getpid()) - others
    asking = asyncio.create_task(verdict(checker, json_form("f", HOSTILE["large multiple"])))
    await eventually(lambda: asking.done() or compilers(process))
    (child,) = compilers(process)
    assert os.sched_getscheduler(child) == os.sched_getscheduler(process) == os.SCHED_IDLE
    assert "it takes too long" in await asking
    await checker.close()


async def test_what_takes_too_much_memory_is_refused() -> None:
    checker = GrammarChecker([resolve_model(MODEL)], max_bytes=2**21, cpu_s=20.0, memory_bytes=2**20)
    many = {"enum": [f"value number {i}" for i in range(40_000)]}
    assert "memory" in await verdict(checker, json_form("f", many))
    await checker.close()


async def test_a_caller_who_leaves_takes_nobody_elses_answer(checker: GrammarChecker) -> None:
    leaving = asyncio.create_task(verdict(checker, json_form("f", HOSTILE["exponential intersection"])))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await verdict(checker, regex_form("f", "a(")) != ""
    assert await verdict(checker, regex_form("f", "a+")) == ""


async def test_too_large_a_schema_is_not_compiled(checker: GrammarChecker) -> None:
    form = json_form("f", {"enum": ["x" * 2**17]})
    assert "larger than 131072 bytes" in await verdict(checker, form)


async def test_workers_get_the_grammar_and_bad_ones_reach_none(mesh: Mesh) -> None:
    await mesh.chat(response_format={"type": "json_object"})
    (request,) = [request for worker in mesh.workers for request in worker.requests]
    assert json.loads(request.sampling.grammar)["grammars"][0]["json_schema"]["type"] == "object"
    asks = len(mesh.router.asks)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "guided_regex": "a("}
    status, error, _ = await mesh.error("ChatCompletions", body)
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert error["param"] == "guided_regex"
    assert "unclosed group" in error["message"]
    assert len(mesh.router.asks) == asks


async def test_no_worker_answers_that_would_not_know_of_the_grammar(mesh: Mesh) -> None:
    """A router of an older release may name one of its time."""
    older, newer = mesh.workers
    older.protocol = FIRST_PROTOCOL
    try:
        await mesh.chat(response_format={"type": "json_object"})
    finally:
        older.protocol = PROTOCOL
    assert [list(ask.excluded_workers) for ask in mesh.router.asks] == [[], [older.worker_id]]
    assert {ask.requires.protocol for ask in mesh.router.asks} == {GRAMMAR_PROTOCOL}
    assert [len(worker.requests) for worker in (older, newer)] == [1, 1]
    await mesh.chat()
    assert not mesh.router.asks[-1].HasField("requires")


async def test_streams_go_on_while_a_grammar_is_compiled(mesh: Mesh) -> None:
    """The event loop is free: requests begin and end while one waits for a verdict."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "guided_json": HOSTILE["large multiple"]}
    hostile = asyncio.create_task(mesh.error("ChatCompletions", body))
    ends_s, served = time.monotonic() + 120, 0
    while not hostile.done() and time.monotonic() < ends_s:
        await mesh.chat()
        served += 1
    status, error, _ = await hostile
    assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert "too long" in error["message"]
    assert served > 3
