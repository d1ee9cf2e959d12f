"""Cores for `bench.handoff` on a small machine: the second worker has one for itself, as it would have a host.

Gateway, router, Envoy, Valkey and the load share the others with the first worker, which gives way to them: a delay of
theirs would count as one of the second worker's tokens. Where the kernel shares the processor among sessions first
(sched(7), "autogroups"), its session does. It is the same in every layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.local_mesh import LocalMesh
from services.common.session_niceness import set_session_niceness

_ALONE, _GIVES_WAY, _NICENESS = "worker-1", "worker-0/engine", 5


@contextmanager
def shared_out(mesh: LocalMesh) -> Iterator[None]:
    """For the time of the context this process is kept off the second worker's core, the mesh for its life.

    Raises ValueError on a machine with one core.
    """
    whole = os.sched_getaffinity(0)
    *others, last = sorted(whole)
    if not others:
        raise ValueError("one core cannot be shared out")
    for name, pid in mesh.pids().items():
        is_alone = name.partition("/")[0] == _ALONE
        for task in _tasks(pid):
            os.sched_setaffinity(task, {last} if is_alone else set(others))
            if name == _GIVES_WAY:
                os.setpriority(os.PRIO_PROCESS, task, _NICENESS)
        if name == _GIVES_WAY:
            set_session_niceness(_NICENESS, pid)
    for task in _tasks(os.getpid()):
        os.sched_setaffinity(task, others)
    try:
        yield
    finally:
        for task in _tasks(os.getpid()):
            os.sched_setaffinity(task, whole)


def _tasks(pid: int) -> list[int]:
    """All threads that a process has; those that it starts later are as their starter."""
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
