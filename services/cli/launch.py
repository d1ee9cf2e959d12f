"""Becomes another program that dies with the process that started it: `launch.py PARENT_PID PROGRAM ARGUMENTS...`.

Run with `python -I -S`, so it imports nothing of ours. The kernel keeps the death signal across exec (Linux).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def launch(parent_pid: int, command: list[str]) -> None:
    """Replace this process by `command`; exits when the parent has gone already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    launch(int(sys.argv[1]), sys.argv[2:])
