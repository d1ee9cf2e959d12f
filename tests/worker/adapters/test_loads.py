"""Loads of adapters whose files hang, and folders that were found to hold none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.common.adapter_files import CONFIG_FILE, InvalidAdapter
from services.worker.adapters.source import AdapterRef
from services.worker.engine.adapter_loads import MOST_THREADS, AdapterLoads, Loaded, LoadStalled
from services.worker.engine.failed_adapters import REMEMBERED_S, RememberedFailures

REFS = [AdapterRef(bytes([number]) * 16, f"/adapters/{number}") for number in range(40)]
MOST_S = 5.0
WITHIN_S = 30.0


@dataclass(frozen=True)
class Prepared:
    num_bytes: int = 1


class Files:
    """A storage of which some folders hang until they are let go."""

    def __init__(self) -> None:
        self.hangs: dict[AdapterRef, threading.Event] = {}
        self.read: list[AdapterRef] = []

    def hang(self, *adapters: AdapterRef) -> None:
        self.hangs |= {adapter: threading.Event() for adapter in adapters}

    def load(self, adapter: AdapterRef) -> Loaded:
        self.read.append(adapter)
        if adapter in self.hangs:
            assert self.hangs[adapter].wait(WITHIN_S)
        return Prepared(), 0.0

    def let_go(self) -> None:
        for event in self.hangs.values():
            event.set()


def taken(
    loads: AdapterLoads, now: float, until: Callable[[dict[int, Future[Loaded]]], bool]
) -> dict[int, Future[Loaded]]:
    """Futures by slot of what has ended, once that is enough."""
    ends_s, found = time.monotonic() + WITHIN_S, dict[int, Future[Loaded]]()
    while not until(found):
        assert time.monotonic() < ends_s, found
        found |= {slot: future for slot, _, future in loads.take(now)}
        time.sleep(0.001)
    return found


def test_loads_that_hang_keep_others_from_their_threads_for_a_moment_only() -> None:
    files = Files()
    loads = AdapterLoads(files.load, most_s=MOST_S)
    files.hang(*REFS[:2])
    for slot in range(4):
        loads.begin(slot, REFS[slot], 0.0)
    assert not loads.take(0.5)
    assert set(files.read) <= {*REFS[:2]}, "two at once, and both hang"
    found = taken(loads, 1.5, lambda found: len(found) == 2)
    assert found.keys() == {2, 3}
    stalled = taken(loads, MOST_S + 1, lambda found: len(found) == 2)
    assert all(isinstance(future.exception(), LoadStalled) for future in stalled.values())
    assert loads.stalls == 2
    loads.begin(0, REFS[0], MOST_S + 1)
    again = taken(loads, MOST_S + 1, lambda found: len(found) == 1)
    assert isinstance(again[0].exception(), LoadStalled), "while its read hangs nobody reads it again"
    files.let_go()
    ends_s = time.monotonic() + WITHIN_S
    while loads.num_given_up:
        assert time.monotonic() < ends_s
        assert not loads.take(MOST_S + 1), "what was given up brings nothing"
    loads.begin(0, REFS[0], MOST_S + 1)
    assert taken(loads, MOST_S + 1, lambda found: len(found) == 1)[0].result()[0] == Prepared()


def test_threads_that_hang_are_bounded_and_nobody_waits_for_them_for_ever() -> None:
    files = Files()
    loads = AdapterLoads(files.load, most_s=MOST_S)
    files.hang(*REFS)
    now, ended = 0.0, list[Future[Loaded]]()
    for slot, adapter in enumerate(REFS):
        loads.begin(slot, adapter, now)
    for _ in range(20):
        now += 1.25
        ended += [future for _, _, future in loads.take(now)]
    assert loads.num_given_up == MOST_THREADS
    assert loads.is_stuck
    assert len(files.read) <= MOST_THREADS
    assert len(ended) == loads.stalls == len(REFS)
    assert all(isinstance(future.exception(), LoadStalled) for future in ended)
    files.let_go()
    ends_s = time.monotonic() + WITHIN_S
    while loads.num_given_up:
        assert time.monotonic() < ends_s
        loads.take(now)
        time.sleep(0.001)
    assert not loads.is_stuck
    loads.begin(0, REFS[-1], now)
    assert taken(loads, now, lambda found: len(found) == 1)[0].result()[0] == Prepared()


def test_a_folder_without_an_adapter_is_read_again_when_it_has_changed_or_after_a_while(tmp_path: Path) -> None:
    now, reads = [0.0], list[AdapterRef]()

    def load(adapter: AdapterRef) -> Prepared:
        reads.append(adapter)
        if (tmp_path / CONFIG_FILE).exists():
            return Prepared()
        raise InvalidAdapter("nothing there")

    remembering = RememberedFailures(load, clock=lambda: now[0])
    adapter, other = (AdapterRef(bytes([number]) * 16, str(tmp_path)) for number in (1, 2))
    for _ in range(3):
        with pytest.raises(InvalidAdapter, match="nothing there"):
            remembering(adapter)
    assert len(reads) == 1
    with pytest.raises(InvalidAdapter):
        remembering(other)
    assert len(reads) == 2, "the same folder may hold what another request wants"
    now[0] += REMEMBERED_S
    with pytest.raises(InvalidAdapter):
        remembering(adapter)
    assert len(reads) == 3
    (tmp_path / CONFIG_FILE).write_text("{}")
    assert remembering(adapter) == Prepared()
