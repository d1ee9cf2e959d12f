"""Steps on their way from rank 0 to another rank of the same host, and back that they are done.

A step is a header of int32, the shapes of StepInput's arrays in order, and the arrays as they lie in memory; one that
is absent is empty. The answer is one byte. Over a Unix stream socket; at most one step is under way.
"""

from __future__ import annotations

import socket
from dataclasses import fields

import numpy as np

from services.worker.errors import RankLost
from services.worker.model.step import Int32Array, StepInput

_DIMENSIONS = {field.name: 2 if field.name == "block_tables" else 1 for field in fields(StepInput)}
_HEADER_LENGTH = sum(_DIMENSIONS.values())
_OPTIONAL = frozenset(field.name for field in fields(StepInput) if field.default is None)
_ABSENT = np.empty(0, np.int32)
# What a step can need, far above any: a peer that says more is out of step.
_MOST_BYTES = 2**30
_DONE = b"\1"


class StepLink:
    """One end. timeout_s: of every operation."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        self.socket = sock

    def send(self, step: StepInput) -> None:
        """Raises RankLost."""
        given = {name: getattr(step, name) for name in _DIMENSIONS}
        arrays = [np.ascontiguousarray(_ABSENT if one is None else one, np.int32) for one in given.values()]
        header = np.array([size for array in arrays for size in array.shape], np.int32)
        try:
            self.socket.sendall(b"".join((header.tobytes(), *(array.tobytes() for array in arrays))))
        except OSError as error:
            raise RankLost(f"another rank takes no steps: {error}") from error

    def receive(self) -> StepInput:
        """Wait for a step. Raises RankLost."""
        sizes = iter(self._read(_HEADER_LENGTH).tolist())
        shapes = {name: tuple(next(sizes) for _ in range(count)) for name, count in _DIMENSIONS.items()}
        arrays = {name: self._read(int(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
        return StepInput(**{name: array for name, array in arrays.items() if array.size or name not in _OPTIONAL})

    def tell_done(self) -> None:
        """The step's KV is in the pool. Raises RankLost."""
        try:
            self.socket.sendall(_DONE)
        except OSError as error:
            raise RankLost(f"rank 0 is gone: {error}") from error

    def wait_done(self) -> None:
        """Until the other end has told that. Raises RankLost."""
        try:
            told = self.socket.recv(1)
        except OSError as error:
            raise RankLost(f"another rank does not finish its step: {error}") from error
        if told != _DONE:
            raise RankLost("another rank has gone in the midst of a step")

    def _read(self, count: int) -> Int32Array:
        if not 0 <= count <= _MOST_BYTES // 4:
            raise RankLost(f"a step with an array of {count} values")
        array = np.empty(count, np.int32)
        view = memoryview(array.view(np.uint8).data)
        while view.nbytes:
            try:
                received = self.socket.recv_into(view)
            except OSError as error:
                raise RankLost(f"rank 0 sends half a step: {error}") from error
            if not received:
                raise RankLost("rank 0 has gone")
            view = view[received:]
        return array
