"""What rank 0 and another rank say to each other over their link, as bytes.

Rank 0 sends frames: a header of int32 and arrays as they lie in memory. A step's header has the shapes of StepInput's
arrays in order; one that is absent is empty. The headers of the other two, which ask for the rank's parts of blocks and
bring them, have the number of blocks and the bytes of their parts together. The answer to a step is one byte; to a
question for parts another one and the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from services.worker.errors import RankLost
from services.worker.model.step import Int32Array, StepInput

DONE, PARTS = b"\1", b"\2"
_STEP, _GATHER, _SCATTER = range(3)
_DIMENSIONS = {field.name: 2 if field.name == "block_tables" else 1 for field in fields(StepInput)}
_OPTIONAL = frozenset(field.name for field in fields(StepInput) if field.default is None)
_ABSENT = np.empty(0, np.int32)
# What a frame can need, far above any: a peer that says more is out of step.
_MOST_BYTES = 2**30
ByteArray = NDArray[np.uint8]
# Fills the memory that it is given. Raises RankLost.
ReadInto = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class GatherParts:
    """Answer with the rank's parts of the blocks in these pool slots, in this order."""

    slots: Int32Array


@dataclass(frozen=True, slots=True)
class ScatterParts:
    """Put the rank's parts, one after the other, into these pool slots."""

    slots: Int32Array
    parts: ByteArray


def step_frame(step: StepInput) -> bytes:
    """Run a step."""
    given = {name: getattr(step, name) for name in _DIMENSIONS}
    arrays = [np.ascontiguousarray(_ABSENT if one is None else one, np.int32) for one in given.values()]
    header = np.array([_STEP, *(size for array in arrays for size in array.shape)], np.int32)
    return b"".join((header.tobytes(), *(array.tobytes() for array in arrays)))


def gather_frame(slots: Sequence[int]) -> bytes:
    """Ask for parts of blocks."""
    return np.array([_GATHER, len(slots), 0, *slots], np.int32).tobytes()


def scatter_frame(slots: Sequence[int], num_bytes: int) -> bytes:
    """Bring parts of blocks, of so many bytes together, which follow the frame."""
    return np.array([_SCATTER, len(slots), num_bytes, *slots], np.int32).tobytes()


def read_frame(read: ReadInto) -> StepInput | GatherParts | ScatterParts:
    """The next frame. Raises RankLost, also for one that cannot be."""
    kind = int(_int32(read, 1)[0])
    if kind == _STEP:
        return _read_step(read)
    if kind not in (_GATHER, _SCATTER):
        raise RankLost(f"rank 0 sends frames of kind {kind}")
    count, num_bytes = _int32(read, 2).tolist()
    slots = _int32(read, count)
    return GatherParts(slots) if kind == _GATHER else ScatterParts(slots, _bytes(read, num_bytes))


def _read_step(read: ReadInto) -> StepInput:
    sizes = iter(_int32(read, sum(_DIMENSIONS.values())).tolist())
    shapes = {name: tuple(next(sizes) for _ in range(count)) for name, count in _DIMENSIONS.items()}
    arrays = {name: _int32(read, int(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    return StepInput(**{name: array for name, array in arrays.items() if array.size or name not in _OPTIONAL})


def _int32(read: ReadInto, count: int) -> Int32Array:
    return _bytes(read, 4 * count).view(np.int32)


def _bytes(read: ReadInto, size: int) -> ByteArray:
    if not 0 <= size <= _MOST_BYTES:
        raise RankLost(f"a frame with an array of {size} bytes")
    array = np.empty(size, np.uint8)
    read(memoryview(array.data))
    return array
