"""Errors of the worker.

    WorkerError
    ├── Refused            the request cannot be served here; carries the gRPC status name
    ├── QueueFull          the queue is longer than the router's decision assumed (answered Stale)
    ├── ChildDied          the engine, another rank or the mover has ended, or has fallen silent
    ├── RankLost           another rank of the group is gone or out of step; ends the process that sees it
    └── StartFailed        a child could not start or a model not be loaded; one line

`Refused.code` is the name of a gRPC status, the one table between domain and wire.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of all errors of the worker."""


class Refused(WorkerError):
    """A request that cannot be served here; nobody else is affected."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class QueueFull(WorkerError):
    """More work is waiting than the router's decision assumed."""


class ChildDied(WorkerError):
    """The engine, another rank or the mover has ended or no longer answers."""


class RankLost(WorkerError):
    """Another rank does not answer, or a step has broken off in its midst: nothing more can be computed together."""


class StartFailed(WorkerError):
    """A child process could not start, or a model could not be loaded. kind: the child's exception, where it told."""

    def __init__(self, detail: str, kind: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
