"""`make test`: every test, in phases; what fails is run once more, alone on the machine, and counts if it fails again.

Phases of one row run at the same time. Each has a cache directory of its own, since pytest keeps there what failed. A
phase that ends in another way than by passed or failed tests (a collection error, a crash) ends everything at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED = 0, 1
# For the meshes of an interrupted run to be taken down.
STOP_WITHIN_S = 60.0
CACHES = Path(".pytest_cache").absolute()
# Real models and whole meshes: about as long as all that is in no other phase.
MODELS = ("tests/e2e", "tests/envoy", "tests/worker")
# Computes, starts nothing and gives way to the tests beside it, which mostly wait.
COMPUTING = ("tests/kernels", "tests/worker/model")
# Processes are killed and lag tells something: they have the machine for themselves.
MESHES = ("tests/faults", "tests/versions")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Phase:
    """One run of pytest. nice: how much it gives way to others."""

    name: str
    arguments: tuple[str, ...]
    nice: int = 0
    caches: Path = CACHES

    def pytest(self, *more: str) -> tuple[str, ...]:
        """The command; `more` goes before what is tested."""
        cache = f"cache_dir={self.caches / self.name}"
        return ("nice", "-n", str(self.nice), sys.executable, "-m", "pytest", "-o", cache, *more, *self.arguments)

    def failed(self) -> list[str]:
        """The tests that failed when it last ran."""
        kept = self.caches / self.name / "v" / "cache" / "lastfailed"
        return sorted(json.loads(kept.read_text())) if kept.exists() else []


ROWS = (
    (
        Phase("models", (*MODELS, *(f"--ignore={path}" for path in COMPUTING))),
        Phase("parts", tuple(f"--ignore={path}" for path in (*MODELS, *COMPUTING, *MESHES))),
        Phase("computing", COMPUTING, nice=19),
    ),
    (Phase("meshes", MESHES),),
)


def run(rows: Sequence[Sequence[Phase]], say: Say = print) -> int:
    """Exit status of all: 0 when every test has passed, at the second try at the latest."""
    again: list[Phase] = []
    for row in rows:
        for phase, status in zip(row, _side_by_side(row, say), strict=True):
            if status not in (PASSED, FAILED):
                say(f"{phase.name}: pytest ended with {status}")
                return status
            again += [phase] * (status == FAILED)
    at_first = {phase: phase.failed() for phase in again}
    lost = []
    for phase, tests in at_first.items():
        say("\n".join([f"{phase.name}: failed at first, and now run again alone:", *(f"  {test}" for test in tests)]))
        with _Running(phase, "--last-failed", "--last-failed-no-failures", "none") as second:
            status = second.wait()
        if status not in (PASSED, FAILED):
            say(f"{phase.name}: pytest ended with {status}")
            return status
        lost += phase.failed() if status == FAILED else []
    flaky = [test for tests in at_first.values() for test in tests if test not in lost]
    for told, tests in (("passed only when run again", flaky), ("FAILED twice", lost)):
        for test in tests:
            say(f"{told}: {test}")
    return FAILED if lost else PASSED


def _side_by_side(row: Sequence[Phase], say: Say) -> list[int]:
    """Exit statuses. The first one's output is shown as it comes, the others' at their ends.

    When the first one ends in another way than by passed or failed tests, the others are not waited for.
    """
    first, *beside = row
    with ExitStack() as running:
        logs = [phase.caches / f"{phase.name}.log" for phase in beside]
        others = [
            running.enter_context(_Running(phase, "--cache-clear", log=log))
            for phase, log in zip(beside, logs, strict=True)
        ]
        status = running.enter_context(_Running(first, "--cache-clear")).wait()
        if status not in (PASSED, FAILED):
            return [status, *([PASSED] * len(beside))]
        statuses = [status]
        for other, log in zip(others, logs, strict=True):
            statuses.append(other.wait())
            say(log.read_text(errors="replace"))
        return statuses


class _Running:
    """A run of a phase; one that still runs at the end of the block is interrupted, so that it stops what it started.

    In a process group of its own: an interrupt from a terminal reaches it once, by way of here.
    """

    def __init__(self, phase: Phase, *more: str, log: Path | None = None) -> None:
        """log: where its output goes, if not where this process's goes."""
        phase.caches.mkdir(parents=True, exist_ok=True)
        with log.open("wb") if log else nullcontext() as output:
            self._process = subprocess.Popen(
                phase.pytest(*more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                process_group=0,
            )

    def __enter__(self) -> _Running:
        return self

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait()

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


if __name__ == "__main__":
    sys.exit(run(ROWS, lambda text: print(text, flush=True)))
