"""Requests with adapters through the engine's core: loading beside others, full places, and what fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from services.common.adapter_files import InvalidAdapter
from services.worker.adapters.source import AdapterRef
from services.worker.core import EngineCore
from services.worker.draws import Draws
from services.worker.engine.adapters import Adapters
from services.worker.engine.batch import StepBuilder
from services.worker.messages import Abort, RequestFailed, StaleRequest, StepOutput
from services.worker.model.adapter import AdapterWeights, PreparedAdapter
from tests.worker.cores import make_core, submit

PROMPT = [1, 2, 3]
REFS = [AdapterRef(bytes([number]) * 16, f"/adapters/{number}") for number in range(4)]
BROKEN = AdapterRef(b"x" * 16, "/broken")
LARGE, ALSO_LARGE = AdapterRef(b"l" * 16, "/large"), AdapterRef(b"L" * 16, "/also")
MAX_BYTES = 10
MAX_WAIT_S = 5.0
WITHIN_S = 30.0


@dataclass
class Prepared:
    """Stands for an adapter in memory."""

    digest: bytes
    num_bytes: int = 1


@dataclass
class Table:
    """Notes what is put where."""

    num_slots: int = 2
    slots: dict[int, bytes | None] = field(default_factory=dict)

    def prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        raise NotImplementedError

    def put(self, slot: int, prepared: PreparedAdapter | None) -> None:
        assert prepared is None or isinstance(prepared, Prepared)
        self.slots[slot] = None if prepared is None else prepared.digest


@dataclass
class Engine:
    """A core, its adapters, and a gate that loads wait at."""

    core: EngineCore
    table: Table
    adapters: Adapters
    gate: threading.Event
    load: Callable[[AdapterRef], PreparedAdapter]
    now: float = 0.0

    def turn(self) -> list[int]:
        """One step; adapter slots of its sequences."""
        self.core.take_adapters(self.now)
        chunks = self.core.schedule(self.now)
        if not chunks:
            return []
        step = StepBuilder().build(chunks)
        used = [-1] * len(chunks) if step.adapters is None else step.adapters.tolist()
        drawing = [chunk for chunk in chunks if chunk.draws]
        self.core.commit(chunks, Draws([5] * len(drawing), [None] * len(drawing)), 0.01, self.now)
        return used

    def until(self, condition: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < ends_s
            self.turn()
            time.sleep(0.001)

    def completed(self) -> set[int]:
        outputs = [message for message in self.core.to_front if isinstance(message, StepOutput)]
        return {usage.key for output in outputs for usage in output.completed}

    def failures(self) -> dict[int, str]:
        return {one.key: one.code for one in self.core.to_front if isinstance(one, RequestFailed)}


@pytest.fixture
def engine() -> Iterator[Engine]:
    table, gate = Table(), threading.Event()

    def load(adapter: AdapterRef) -> PreparedAdapter:
        assert gate.wait(WITHIN_S)
        if adapter == BROKEN:
            raise InvalidAdapter("nothing there")
        return Prepared(adapter.digest, MAX_BYTES if adapter in (LARGE, ALSO_LARGE) else 1)

    adapters = Adapters(table, load, max_waiting=1, max_wait_s=MAX_WAIT_S, max_bytes=MAX_BYTES)
    yield Engine(make_core(adapters=adapters), table, adapters, gate, load)
    gate.set()


def test_others_run_while_an_adapter_is_loaded(engine: Engine) -> None:
    engine.core.handle(submit(1, PROMPT, 3, adapter=REFS[0]), 0.0)
    engine.core.handle(submit(2, PROMPT, 3), 0.0)
    assert [engine.turn() for _ in range(3)] == [[-1], [-1], [-1]]
    assert engine.completed() == {2}
    assert engine.core.is_preparing
    engine.gate.set()
    engine.until(lambda: engine.completed() == {1, 2})
    assert engine.table.slots == {0: REFS[0].digest}
    assert engine.core.load(0.0).adapters is not None
    figures = engine.adapters.figures
    assert (figures.resident, figures.loads, figures.idle) == ([REFS[0].digest], 1, 2)


def test_sequences_of_one_step_have_their_own_adapters(engine: Engine) -> None:
    engine.gate.set()
    for key, ref in enumerate((REFS[0], REFS[1], None, REFS[0])):
        engine.core.handle(submit(key, [*PROMPT, key], 50, adapter=ref), 0.0)
    seen: list[list[int]] = []
    engine.until(lambda: bool(seen.append(engine.turn())) or len(seen[-1]) == 4)
    assert sorted(seen[-1]) == [-1, 0, 0, 1]
    digests = {number: engine.table.slots[number] for number in (0, 1)}
    assert digests == {0: REFS[0].digest, 1: REFS[1].digest}


def test_full_places_make_a_bounded_queue_with_a_deadline(engine: Engine) -> None:
    engine.gate.set()
    for key in (1, 2):
        engine.core.handle(submit(key, PROMPT, 200, adapter=REFS[key]), 0.0)
    engine.until(lambda: len(engine.turn()) == 2)
    engine.core.handle(submit(3, PROMPT, 2, adapter=REFS[3]), 0.0)
    engine.core.handle(submit(4, PROMPT, 2, adapter=REFS[0]), 0.0)
    assert any(isinstance(one, StaleRequest) and one.key == 4 for one in engine.core.to_front)
    assert engine.adapters.figures.waiting == 1
    engine.core.handle(Abort(1), 0.0)
    engine.until(lambda: 3 in engine.completed())
    assert engine.adapters.figures.evictions == 1
    engine.until(lambda: engine.adapters.figures.idle == 1)
    engine.core.handle(submit(5, PROMPT, 200, adapter=REFS[1]), 0.0)
    engine.until(lambda: len(engine.turn()) == 2)
    engine.core.handle(submit(6, PROMPT, 2, adapter=REFS[0]), engine.now)
    engine.now += 6.0
    engine.turn()
    assert engine.failures() == {6: "RESOURCE_EXHAUSTED"}


def test_who_waits_for_a_place_keeps_nobody_else_from_running(engine: Engine) -> None:
    engine.core = make_core(adapters=engine.adapters, max_running=5, max_queue_s=0.01)
    engine.gate.set()
    for key in (1, 2):
        engine.core.handle(submit(key, PROMPT, 200, adapter=REFS[key]), 0.0)
    engine.until(lambda: len(engine.turn()) == 2)
    engine.core.handle(submit(3, PROMPT, 2, adapter=REFS[3], num_choices=3), 0.0)
    assert engine.adapters.figures.waiting == 1
    engine.core.handle(submit(4, [5] * 40, 2), 0.0)
    assert not any(isinstance(one, StaleRequest) for one in engine.core.to_front)
    engine.until(lambda: 4 in engine.completed())
    assert engine.adapters.figures.waiting == 1


def test_who_waits_for_an_adapter_to_be_loaded_counts_as_one_who_runs(engine: Engine) -> None:
    engine.core = make_core(adapters=engine.adapters, max_running=5, max_queue_s=0.01)
    engine.core.handle(submit(1, PROMPT, 2, adapter=REFS[1], num_choices=5), 0.0)
    engine.core.handle(submit(2, [5] * 40, 2), 0.0)
    assert [one.key for one in engine.core.to_front if isinstance(one, StaleRequest)] == [2]
    engine.gate.set()
    engine.until(lambda: 1 in engine.completed())


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(engine: Engine) -> None:
    engine.core.handle(submit(1, PROMPT, 2, adapter=BROKEN), 0.0)
    engine.core.handle(submit(2, PROMPT, 2, adapter=REFS[0]), 0.0)
    engine.core.handle(submit(3, PROMPT, 2, adapter=BROKEN), 0.0)
    engine.gate.set()
    engine.until(lambda: engine.completed() == {2} and set(engine.failures()) == {1, 3})
    assert set(engine.failures().values()) == {"FAILED_PRECONDITION"}
    assert engine.adapters.figures.failures == 1
    assert engine.core.is_idle
    assert not engine.core.is_preparing


def test_an_adapter_waits_until_held_ones_leave_memory_for_it(engine: Engine) -> None:
    engine.gate.set()
    engine.core.handle(submit(1, PROMPT, 200, adapter=REFS[1]), 0.0)
    engine.until(lambda: len(engine.turn()) == 1)
    engine.core.handle(submit(2, PROMPT, 2, adapter=LARGE), 0.0)
    engine.until(lambda: engine.adapters.figures.waiting == 1)
    assert engine.adapters.figures.resident == [REFS[1].digest]
    engine.core.handle(Abort(1), 0.0)
    engine.until(lambda: 2 in engine.completed())
    assert engine.adapters.figures.waiting == 0
    assert engine.adapters.figures.resident == [LARGE.digest]
    assert engine.adapters.figures.resident_bytes == MAX_BYTES
    assert [digest for digest in engine.table.slots.values() if digest] == [LARGE.digest]


def test_where_one_waits_for_memory_another_is_sent_elsewhere(engine: Engine) -> None:
    engine.gate.set()
    adapters = Adapters(Table(3), engine.load, max_waiting=1, max_wait_s=MAX_WAIT_S, max_bytes=MAX_BYTES)
    engine.adapters, engine.core = adapters, make_core(adapters=adapters)
    engine.core.handle(submit(1, PROMPT, 200, adapter=REFS[1]), 0.0)
    engine.until(lambda: len(engine.turn()) == 1)
    engine.core.handle(submit(2, PROMPT, 2, adapter=LARGE), 0.0)
    engine.until(lambda: adapters.figures.waiting == 1)
    # As one that cannot be loaded: the gateway tries workers before it comes back.
    engine.core.handle(submit(3, PROMPT, 2, adapter=ALSO_LARGE), 0.0)
    engine.until(lambda: engine.failures() == {3: "FAILED_PRECONDITION"})
    assert adapters.figures.failures == 1
    assert adapters.figures.waiting == 1


def test_an_adapter_that_waits_for_memory_goes_with_those_who_want_it(engine: Engine) -> None:
    engine.gate.set()
    engine.core.handle(submit(1, PROMPT, 200, adapter=REFS[1]), 0.0)
    engine.until(lambda: len(engine.turn()) == 1)
    for key in (2, 3):
        engine.core.handle(submit(key, PROMPT, 2, adapter=LARGE), engine.now)
        engine.until(lambda: engine.adapters.figures.waiting == 1)
        if key == 2:
            engine.core.handle(Abort(key), engine.now)
        else:
            engine.now += MAX_WAIT_S + 1.0
        engine.turn()
        engine.turn()
        assert engine.adapters.figures.waiting == 0
        assert engine.adapters.figures.idle == 1
    # As one that cannot be loaded: the gateway asks for another worker.
    assert engine.failures() == {3: "FAILED_PRECONDITION"}
    assert engine.adapters.figures.failures == 0


def test_who_waits_for_memory_keeps_nobody_else_from_running(engine: Engine) -> None:
    engine.core = make_core(adapters=engine.adapters, max_running=5, max_queue_s=0.01)
    engine.gate.set()
    engine.core.handle(submit(1, PROMPT, 200, adapter=REFS[1]), 0.0)
    engine.until(lambda: len(engine.turn()) == 1)
    engine.core.handle(submit(2, PROMPT, 2, adapter=LARGE, num_choices=4), 0.0)
    engine.until(lambda: engine.adapters.figures.waiting == 1)
    for key, adapter in ((3, REFS[1]), (4, None)):
        engine.core.handle(submit(key, [5] * 40, 2, adapter=adapter), 0.0)
        engine.until(lambda key=key: key in engine.completed())  # type: ignore[misc]
    assert not any(isinstance(one, StaleRequest) for one in engine.core.to_front)
    assert engine.adapters.figures.waits == 1


def test_no_place_is_told_where_held_adapters_leave_no_memory(engine: Engine) -> None:
    engine.gate.set()
    engine.core.handle(submit(1, PROMPT, 200, adapter=LARGE), 0.0)
    engine.until(lambda: len(engine.turn()) == 1)
    assert engine.adapters.figures.idle == 0
    engine.core.handle(Abort(1), 0.0)
    assert engine.adapters.figures.idle == 1, "for one as large"


def test_where_all_threads_hang_those_that_are_resident_stay(engine: Engine) -> None:
    table, hanging = Table(num_slots=10), [AdapterRef(bytes([number]) * 16, "/hangs") for number in range(20, 30)]

    def load(adapter: AdapterRef) -> PreparedAdapter:
        assert adapter not in hanging or engine.gate.wait(WITHIN_S)
        return Prepared(adapter.digest)

    engine.adapters = adapters = Adapters(table, load, max_waiting=1, max_wait_s=MAX_WAIT_S, max_bytes=MAX_BYTES)
    engine.core = make_core(adapters=adapters, max_running=20)
    engine.core.handle(submit(1, PROMPT, 2, adapter=REFS[0]), 0.0)
    engine.until(lambda: 1 in engine.completed())
    # Eight get a thread each, and one waits for one.
    for key, adapter in enumerate(hanging[:9], start=2):
        engine.core.handle(submit(key, PROMPT, 2, adapter=adapter), 0.0)
    for _ in range(12):
        engine.now += 1.1
        engine.turn()
    assert engine.failures().keys() == set(range(2, 11))
    assert not engine.core.is_preparing, "the loop may rest"
    assert (adapters.figures.resident, adapters.figures.idle) == ([REFS[0].digest], 0)
    for key, adapter in ((12, REFS[1]), (13, hanging[9]), (14, REFS[0])):
        engine.core.handle(submit(key, PROMPT, 2, adapter=adapter), engine.now)
    engine.until(lambda: 14 in engine.completed())
    assert {engine.failures()[key] for key in (12, 13)} == {"FAILED_PRECONDITION"}
    assert (adapters.figures.resident, adapters.figures.evictions) == ([REFS[0].digest], 0)
    engine.gate.set()
    engine.until(lambda: adapters.figures.idle == 10)
    engine.core.handle(submit(15, PROMPT, 2, adapter=REFS[1]), engine.now)
    engine.until(lambda: 15 in engine.completed())


def test_files_that_never_come_keep_neither_a_slot_nor_the_other_adapters_waiting(engine: Engine) -> None:
    hanging = [AdapterRef(bytes([number]) * 16, "/hangs") for number in (8, 9)]
    for key, adapter in enumerate(hanging, start=1):
        engine.core.handle(submit(key, PROMPT, 2, adapter=adapter), 0.0)
    engine.now = MAX_WAIT_S + 1.0
    engine.turn()
    assert engine.failures().keys() == {1, 2}
    assert (engine.adapters.figures.stalls, engine.adapters.figures.idle) == (2, 2)
    engine.core.handle(submit(3, PROMPT, 2, adapter=REFS[0]), engine.now)
    engine.core.handle(submit(4, PROMPT, 2, adapter=hanging[0]), engine.now)
    engine.until(lambda: engine.failures().keys() == {1, 2, 4})
    engine.gate.set()
    engine.until(lambda: 3 in engine.completed())
    assert engine.adapters.figures.resident == [REFS[0].digest]


def test_a_core_without_adapters_refuses_them() -> None:
    core = make_core()
    core.handle(submit(1, PROMPT, 2, adapter=REFS[0]), 0.0)
    (message,) = core.to_front
    assert isinstance(message, RequestFailed)
    assert message.code == "FAILED_PRECONDITION"
