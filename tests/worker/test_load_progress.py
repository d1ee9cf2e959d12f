"""How far a load is: told a few times a second and at the end, logged, measured, read again by the command line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from services.cli.load_progress import progress_of
from services.worker.engine.load_progress import ProgressTeller, memory_figures
from services.worker.engine_messages import LoadProgress
from services.worker.load_log import LoadLog
from services.worker.model.memory import MemoryMap


class Clock:
    """Time that moves when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_engine_tells_sparingly_and_of_the_end() -> None:
    clock, told = Clock(), list[LoadProgress]()
    teller = ProgressTeller(1000, told.append, clock)
    for _ in range(3):
        teller.add(100)
    clock.now += 0.3
    teller.add(100)
    teller.add(600)
    assert [one.done_bytes for one in told] == [100, 400, 1000]
    assert {one.total_bytes for one in told} == {1000}


def test_threads_lose_no_bytes() -> None:
    told = list[LoadProgress]()
    teller = ProgressTeller(40_000, told.append, Clock())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(teller.add, [1] * 40_000))
    assert told[-1].done_bytes == 40_000


def test_the_front_logs_every_two_seconds() -> None:
    clock = Clock()
    log = LoadLog(clock)
    with capture_logs() as lines:
        log.begin("m", "loading")
        log.told(10, 200)
        clock.now += 2.1
        log.told(50, 200)
        log.told(60, 200)
    assert [(line["event"], line["model"], line["percent"]) for line in lines] == [("loading", "m", 25)]
    assert (log.done_bytes, log.total_bytes) == (60, 200)
    log.clear()
    assert (log.done_bytes, log.total_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("", ""),
        ('kvmesh_worker_load_done_bytes{phase="loading"} 5.0\n', ""),
        (
            'kvmesh_worker_load_done_bytes{otel_scope_name="kvmesh.worker",phase="loading"} 5e+08\n'
            'kvmesh_worker_load_total_bytes{otel_scope_name="kvmesh.worker",phase="loading"} 1.1e+09\n',
            "loading 45 %",
        ),
        (
            'kvmesh_worker_load_done_bytes{phase="copying"} 0.0\nkvmesh_worker_load_total_bytes{phase="copying"} 0.0\n',
            "copying",
        ),
    ],
)
def test_the_command_line_reads_it_from_metrics(page: str, line: str) -> None:
    assert progress_of(page) == line


def test_memory_figures_are_the_map_s() -> None:
    memory = MemoryMap("cpu", 1000, 100, 50, 10, 20, max_context=4096, staging_bytes=7)
    figures = memory_figures(memory)
    assert {name: getattr(figures, name) for name in figures.__struct_fields__} == {
        name: getattr(memory, name) for name in figures.__struct_fields__
    }
    assert (figures.kv_bytes, figures.largest_context, figures.unused_bytes) == (200, 320, 650)
