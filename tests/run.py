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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED = 0, 1
# For the meshes of an interrupted run to be taken down.
STOP_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1
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
        with _running([phase], [None], "--last-failed", "--last-failed-no-failures", "none") as (second,):
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
    """Exit statuses. The first one's output is shown as it comes, the others' as they end.

    When one ends in another way than by passed or failed tests, those that still run are ended, and have passed.
    """
    logs = [None, *(phase.caches / f"{phase.name}.log" for phase in row[1:])]
    statuses: dict[int, int] = {}
    with _running(row, logs, "--cache-clear") as processes:
        while len(statuses) < len(row) and not set(statuses.values()) - {PASSED, FAILED}:
            time.sleep(_LOOK_EVERY_S)
            for number, (process, log) in enumerate(zip(processes, logs, strict=True)):
                if number not in statuses and process.poll() is not None:
                    statuses[number] = process.wait()
                    if log is not None:
                        say(log.read_text(errors="replace"))
    return [statuses.get(number, PASSED) for number in range(len(row))]


@contextmanager
def _running(
    phases: Sequence[Phase], logs: Sequence[Path | None], *more: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs of phases; those that still run at the end of the block are interrupted, to stop what they have started.

    Each is in a process group of its own: an interrupt from a terminal reaches it once, by way of here. logs: where its
    output goes, None: where this process's does.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for phase, log in zip(phases, logs, strict=True):
            phase.caches.mkdir(parents=True, exist_ok=True)
            with log.open("wb") if log else nullcontext() as output:
                command = phase.pytest(*more)
                stderr = subprocess.STDOUT if log else None
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=stderr, process_group=0)
                )
        yield processes
    finally:
        _end([process for process in processes if process.poll() is None])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """All are told before any is waited for; who is impatient, or interrupts once more, has them killed."""
    until_s = time.monotonic() + STOP_WITHIN_S
    try:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(rows: Sequence[Sequence[Phase]] = ROWS) -> int:
    """`run` for a command: whoever is told to end ends what it runs, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    return run(rows, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
