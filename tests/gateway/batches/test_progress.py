"""How far batches are: kept between looks, bounded, and no batch's large log in another's way."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from services.gateway.batches.durable import make_folder
from services.gateway.batches.progress import Progress
from services.gateway.batches.result_log import begin_generation, log_path
from tests.support.waiting import PATIENCE_S


def answered(folder: Path, count: int) -> Path:
    """A batch's folder with so many answers, every other one of status 200."""
    make_folder(folder)
    _, writer = begin_generation(folder)
    for number in range(count):
        writer.append(number, b"{}", is_ok=number % 2 == 0)
    writer.close()
    return folder


def test_counts_go_on_from_the_last_look_and_may_be_forgotten(tmp_path: Path) -> None:
    progress = Progress(max_kept=2)
    folders = [answered(tmp_path / str(number), number) for number in range(5)]
    wanted = [((number + 1) // 2, number // 2) for number in range(5)]
    for _ in range(2):
        assert [progress.of(folder.name, folder) for folder in folders] == wanted
    with log_path(folders[4], 1).open("ab") as log:
        log.write(b"torn")
    assert progress.of("4", folders[4]) == wanted[4]
    progress.forget("4")
    assert progress.of("4", folders[4]) == wanted[4]


def test_a_look_that_failed_counts_nothing(tmp_path: Path) -> None:
    folder, progress = answered(tmp_path / "one", 5), Progress()
    assert progress.of("one", folder) == (3, 2)
    begin_generation(folder)[1].close()
    hidden = log_path(folder, 1).rename(tmp_path / "hidden")
    with pytest.raises(OSError, match=r"log\.1"):
        progress.of("one", folder)
    hidden.rename(log_path(folder, 1))
    assert progress.of("one", folder) == (3, 2)


def test_nobody_waits_for_a_log_that_another_reads(tmp_path: Path) -> None:
    progress = Progress()
    slow, quick = tmp_path / "slow", answered(tmp_path / "quick", 4)
    make_folder(slow)
    # Whoever opens it to read waits until somebody writes.
    os.mkfifo(log_path(slow, 1))

    def look() -> None:
        # A pipe has no places to read from, which ends the look once it has been opened.
        with contextlib.suppress(OSError):
            progress.of("slow", slow)

    looks = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    others = [threading.Thread(target=progress.of, args=("quick", quick), daemon=True) for _ in range(2)]
    for one in (*looks, *others):
        one.start()
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(one.is_alive() for one in (*looks, *others)) > 1:
            assert time.monotonic() < deadline_s, "only the first look at the slow one takes long"
            time.sleep(0.01)
        (stuck,) = (one for one in looks if one.is_alive())
    finally:
        release(stuck, log_path(slow, 1), log_path(quick, 1).read_bytes().splitlines()[0] + b"\n")


def release(stuck: threading.Thread, fifo: Path, header: bytes) -> None:
    """Give the reader what it waits for, until it has it all."""
    for _ in range(int(PATIENCE_S / 0.01)):
        descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        os.write(descriptor, header)
        os.close(descriptor)
        stuck.join(0.01)
        if not stuck.is_alive():
            return
    raise TimeoutError
