"""How answers under mixed load and the memory of processes are judged, and what is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos_streams import Answer, Choice
from bench.fault_mesh import Books
from bench.mixed import at_the_end, is_right, summary
from bench.mixed_jobs import MIXED_KINDS, first_turn, model_jobs, next_turn
from bench.process_memory import Growth, Memory, MemoryLog, numbers_of

MODELS = ("one", "one:red", "two")


def test_all_models_are_asked_the_same_and_every_job_has_its_number() -> None:
    jobs = [job for model in MODELS for job in model_jobs(model, 8, MODELS.index(model) * 100)]
    assert len({job.number for job in jobs}) == len(jobs) == len(MODELS) * (len(MIXED_KINDS) + 1)
    asked = [[{**job.body, "model": ""} for job in jobs if job.body["model"] == model] for model in MODELS]
    assert asked[0] == asked[1] == asked[2]


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    turn = first_turn("one", 8, 0)
    for number in range(1, 10):
        following = next_turn(turn, f"answer {number}", number)
        if following is None:
            break
        assert following.number == number
        messages = following.body["messages"]
        assert messages[:-2] == turn.body["messages"]
        assert messages[-2] == {"role": "assistant", "content": f"answer {number}"}
        turn = following
    assert len(turn.body["messages"]) == 8


def test_a_summary_tells_whose_answers_differ() -> None:
    jobs = [model_jobs(model, 8, number)[0] for number, model in enumerate(MODELS)]
    texts = ("a red house", "a blue house", "a red house")
    alone = {n: said(n, text) for n, text in enumerate(texts)}
    broken = said(2, "")
    broken.error = "gone"
    found = summary(jobs, alone, [said(0, texts[0]), said(1, texts[0]), said(1, texts[1]), broken])
    assert (found["answers"], found["complete"], found["equal"]) == (4, 3, 2)
    assert found["differing"] == {"one:red, greedy: other": 1}
    assert found["errors"] == {"two, greedy: gone": 1}
    assert found["by_model"] == {"one": 1, "one:red": 2}
    assert found["alike_alone"] == {"greedy": 2}


GROWS = Growth(100.0, 150.0, 100.0, 120.0, 150.0)
STAYS = Growth(100.0, 150.0, 100.0, 120.0, 121.0)


@pytest.mark.parametrize(
    ("books", "growth", "text", "expected"),
    [
        (Books({}, {}, 0.0, ()), STAYS, "one", True),
        (Books({}, {}, 0.0, ()), STAYS, "two", False),
        (Books({"worker-0 kvmesh_worker_pins": 1.0}, {}, 0.0, ()), STAYS, "one", False),
        (Books({}, {}, 0.0, ("router-0",)), STAYS, "one", False),
        (Books({}, {}, 0.0, ()), GROWS, "one", False),
    ],
)
def test_what_a_run_has_to_end_with(books: Books, growth: Growth, text: str, *, expected: bool) -> None:
    found = summary(model_jobs("one", 8, 0)[:1], {0: said(0, "one")}, [said(0, text)])
    assert is_right(found | at_the_end(books, {"router-0": growth})) is expected


def said(job: int, text: str) -> Answer:
    return Answer(job, "greedy", {0: Choice(text, "length")}, done=True)


@given(st.integers(3, 60), st.integers(0, 4), st.integers(50, 500))
def test_growth_is_that_of_the_second_half(count: int, step: int, first: int) -> None:
    """Of a process that fills its caches in the first half and of one that never ends to grow."""
    log = MemoryLog()
    filling = [min(number, count // 3) * 100.0 for number in range(count)]
    log.samples["fills"] = [Memory(mib + 1000, first + mib) for mib in filling]
    log.samples["grows"] = [Memory(1000, first + step * number) for number in range(count)]
    growth = log.growth()
    assert growth["fills"].late == 0
    assert not growth["fills"].is_leak
    grown = growth["grows"]
    assert abs(grown.late - step * (count - 1) / 2) <= step * (1 + count / 10)
    assert grown.private_start <= grown.private_middle <= grown.private_end
    assert not grown.is_leak or grown.late > 8


# A process of its own: this one may have room for it already. It says a line when it has begun, and when it has more.
GROWS = "kept = []; print(flush=True); input(); kept.append(b'1' * 2**26); print(flush=True); input()"


def test_memory_that_is_kept_is_seen_and_a_process_that_is_gone_is_left_out(tmp_path: Path) -> None:
    log = MemoryLog()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=PIPE, stdout=PIPE) as grows:
        assert grows.stdin is not None
        assert grows.stdout is not None
        pids = {"here": grows.pid, "gone": ended.pid}
        for _ in range(2):
            grows.stdout.readline()
            log.take(pids)
            grows.stdin.write(b"\n")
            grows.stdin.flush()
    assert set(log.samples) == {"here"}
    before, after = log.samples["here"]
    assert after.private - before.private > 32
    assert after.resident >= after.private
    (tmp_path / "status").write_text("Name:\tme\nVmRSS:\t  12 kB\nThreads:\t3\n")
    assert numbers_of(tmp_path / "status") == {"VmRSS": 12, "Threads": 3}
