"""The rows of the worker table, kept by column: what a decision reads of all workers stands side by side in memory.

All numbers are one matrix, a line for each column, so that a block of them is written for a worker at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from services.router.policies.view import WORKER_ROW, FloatArray, IntArray, WorkerRows


def _lines_of(kinds: Mapping[str, Any]) -> dict[str, slice]:
    """Where each column's numbers stand in the matrix."""
    lines, first = {}, 0
    for name, (kind, *_) in kinds.items():
        if kind.base == np.float64:
            lines[name] = slice(first, first + (kind.shape[0] if kind.shape else 1))
            first = lines[name].stop
    return lines


assert WORKER_ROW.fields is not None
_LINES = _lines_of(WORKER_ROW.fields)
_OTHERS = {name: kind for name, (kind, *_) in WORKER_ROW.fields.items() if name not in _LINES}


def host_number(host: str) -> int:
    """A host's number in the rows."""
    return int.from_bytes(_digest(host), "little", signed=True)


def name_hash(worker_id: str) -> int:
    """What stands for a worker's name in the rows."""
    return int.from_bytes(_digest(worker_id), "little")


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Selection:
    """Some rows, rising. at: the same as an index; a slice, which copies nothing, where they follow each other."""

    rows: IntArray
    at: slice | IntArray

    @classmethod
    def of(cls, rows: IntArray) -> Selection:
        """rows: rising numbers of rows."""
        if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
            return cls(rows, slice(int(rows[0]), int(rows[-1]) + 1))
        return cls(rows, rows)


class RowStore:
    """Columns of WORKER_ROW. Rows that nobody uses are zero."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._numbers: FloatArray = np.zeros((max(lines.stop for lines in _LINES.values()), count))
        self._columns: dict[str, Any] = {name: np.zeros(count, kind) for name, kind in _OTHERS.items()}
        self._name_lines()

    def __getitem__(self, name: str, /) -> Any:
        """A column; [row, class] where it counts by class. Stale once the store has grown."""
        return self._columns[name]

    def __len__(self) -> int:
        return self._count

    def block(self, first: str, last: str) -> FloatArray:
        """[column, row]: all columns of numbers from `first` to `last`, in the order of WORKER_ROW."""
        return self._numbers[_LINES[first].start : _LINES[last].stop]

    def clear(self, row: int) -> None:
        """Nobody uses the row any more."""
        self._numbers[:, row] = 0.0
        for name in _OTHERS:
            self._columns[name][row] = 0

    def grow(self, count: int) -> None:
        """So many rows from now on, those there are first."""
        more = count - self._count
        self._numbers = np.pad(self._numbers, ((0, 0), (0, more)))
        for name in _OTHERS:
            self._columns[name] = np.pad(self._columns[name], (0, more))
        self._count = count
        self._name_lines()

    def pick(self, selection: Selection) -> PickedRows:
        """Those rows only."""
        return PickedRows(self, selection)

    def take(self, rows: Sequence[int] | npt.NDArray[Any]) -> PickedRows:
        """Rows by their numbers."""
        return PickedRows(self, Selection((found := np.asarray(rows, np.int64)), found))

    def _name_lines(self) -> None:
        for name, lines in _LINES.items():
            values = self._numbers[lines]
            self._columns[name] = values.T if WORKER_ROW[name].shape else values[0]


class PickedRows:
    """Some rows of a store as they are now: a column is read when it is first asked for."""

    def __init__(self, rows: WorkerRows, selection: Selection) -> None:
        self._rows = rows
        self._selection = selection
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str, /) -> Any:
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = self._rows[name][self._selection.at]
        return found

    def __len__(self) -> int:
        return len(self._selection.rows)


class OneRow:
    """A single row of a store: numbers in place of columns."""

    def __init__(self, rows: WorkerRows, row: int) -> None:
        self._rows = rows
        self._row = row

    def __getitem__(self, name: str, /) -> Any:
        return self._rows[name][self._row].item()

    def __len__(self) -> int:
        return 1
