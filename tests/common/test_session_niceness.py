"""The niceness of a session, in a process that leads one."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from services.common import session_niceness as module
from services.common.session_niceness import set_session_niceness

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
from pathlib import Path
from services.common.session_niceness import set_session_niceness
for niceness in (7, 0):
    assert set_session_niceness(niceness)
    print(Path("/proc/self/autogroup").read_text().split()[-1])
"""


class BusyFile:
    """Answers as the kernel does where another process has just asked, so many times."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.written = ""

    def write_text(self, text: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EAGAIN, "")
        self.written = text


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share the processor among sessions")
def test_it_is_set_and_taken_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], start_new_session=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["7", "0"]


def test_it_is_asked_for_again_where_the_kernel_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    file = BusyFile(3)
    monkeypatch.setattr(module, "Path", lambda _: file)
    monkeypatch.setattr(module, "_RETRY_S", 0.001)
    assert set_session_niceness(4)
    assert file.written == "4"
    file.refusals = 1000
    assert not set_session_niceness(5)
    assert file.written == "4"


def test_where_sessions_have_none_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_AUTOGROUP", f"{tmp_path}/{{}}/autogroup")
    assert not set_session_niceness(4)
