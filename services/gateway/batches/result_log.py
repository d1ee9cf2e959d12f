"""What a batch's lines were answered, one log for each generation of its run: append-only, checksummed, written once.

Whoever takes a batch over begins the next generation: its log is created exclusively, complete with a first line that
says how many bytes of each older log count. So a writer that was taken over may go on writing, and nothing of it counts
any more; and no line number has two answers, as each generation runs only what those before have not answered.

A line is `CHECKSUM KIND NUMBER PAYLOAD`; the first that is torn or false ends its log. A log lives through SIGKILL as
the kernel has what was written; what a loss of power takes is run again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import msgspec
from xxhash import xxh3_64_hexdigest

from services.gateway.batches.durable import create

_NAME = re.compile(r"log\.([0-9]{1,9})")
_HEADER, _ANSWERED, _FAILED = b"h", b"+", b"-"
_CHECKSUM_BYTES = 16


class Superseded(Exception):
    """A later generation has begun: this one's answers count no more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where the answer of one line is. is_ok: it has status 200."""

    generation: int
    offset: int
    length: int
    is_ok: bool


class _Header(msgspec.Struct, frozen=True):
    """sealed: bytes that count of each older generation's log."""

    sealed: dict[int, int]


@dataclass(slots=True)
class Counts:
    """How many lines have an answer that counts, in all logs below a folder; num_ok: one of status 200.

    `refresh` reads what has been added since; one thread at a time.
    """

    folder: Path
    num_answered: int = 0
    num_ok: int = 0
    generation: int = 0
    _read_to: int = 0
    _sealed: dict[int, int] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Lines with an answer other than 200."""
        return self.num_answered - self.num_ok

    def refresh(self) -> None:
        """Raises OSError."""
        newest = max(generations(self.folder), default=0)
        if newest > self.generation:
            self._begin(newest)
        if self.generation:
            self._read_to = self._read(self.generation, self._read_to, None)

    def sealed(self) -> dict[int, int]:
        """Bytes that count of each log so far: what the next generation begins with."""
        return {**self._sealed, self.generation: self._read_to} if self.generation else {}

    def _begin(self, generation: int) -> None:
        header = _header(self.folder, generation)
        self._forget()
        self.generation, self._read_to, self._sealed = generation, 0, header.sealed
        for older in sorted(header.sealed):
            self._read(older, 0, header.sealed[older])

    def _read(self, generation: int, start: int, end: int | None) -> int:
        """Take in the lines from one offset to another, None for all there are; where it came to."""
        at = start
        with log_path(self.folder, generation).open("rb") as file:
            file.seek(start)
            while end is None or at < end:
                line = file.readline()
                parsed = _parse(line)
                if parsed is None:
                    break
                kind, number, payload_at = parsed
                if kind != _HEADER:
                    self._take(
                        number, Answer(generation, at + payload_at, len(line) - payload_at - 1, kind == _ANSWERED)
                    )
                at += len(line)
        return at

    def _forget(self) -> None:
        self.num_answered = self.num_ok = 0

    def _take(self, number: int, answer: Answer) -> None:
        """An answer, each line's only one."""
        self.num_answered += 1
        self.num_ok += answer.is_ok


@dataclass(slots=True)
class Results(Counts):
    """The answers themselves, too, by line."""

    answers: dict[int, Answer] = field(default_factory=dict)

    def payload(self, answer: Answer) -> bytes:
        """The text of one answer. Raises OSError."""
        with log_path(self.folder, answer.generation).open("rb") as file:
            file.seek(answer.offset)
            return file.read(answer.length)

    def _forget(self) -> None:
        Counts._forget(self)
        self.answers = {}

    def _take(self, number: int, answer: Answer) -> None:
        if number not in self.answers:
            Counts._take(self, number, answer)
            self.answers[number] = answer


class ResultWriter:
    """The log of the newest generation, for whoever has begun it. `append` may be called by several threads."""

    def __init__(self, folder: Path, generation: int) -> None:
        """Raises OSError."""
        self.generation = generation
        self._next = log_path(folder, generation + 1)
        # A thread whose caller has gone may still write when the log is closed.
        self._lock = Lock()
        self._descriptor = os.open(log_path(folder, generation), os.O_WRONLY | os.O_APPEND)

    def append(self, number: int, payload: bytes, *, is_ok: bool) -> None:
        """Answer a line. payload: JSON without a line break. Raises Superseded, and OSError where it is not written.

        After an OSError the end of the log may be torn: a new generation has to go on.
        """
        assert b"\n" not in payload
        self.check()
        line = _line(_ANSWERED if is_ok else _FAILED, number, payload)
        with self._lock:
            if os.write(self._descriptor, line) != len(line):
                raise OSError("a result was written in part")

    def check(self) -> None:
        """Raise Superseded where another has taken over."""
        if self._next.exists():
            raise Superseded

    def close(self) -> None:
        """Nothing more is appended. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


def begin_generation(folder: Path) -> tuple[Results, ResultWriter]:
    """What was answered before, and the log that goes on from there. Raises Superseded where another was faster."""
    results = Results(folder)
    results.refresh()
    generation = results.generation + 1
    header = _line(_HEADER, 0, msgspec.json.encode(_Header(results.sealed())))
    if not create(log_path(folder, generation), header):
        raise Superseded
    results.refresh()
    return results, ResultWriter(folder, generation)


def generations(folder: Path) -> list[int]:
    """Numbers of the logs that are there. Raises OSError."""
    return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)) is not None]


def log_path(folder: Path, generation: int) -> Path:
    """The log of one generation."""
    return folder / f"log.{generation}"


def _header(folder: Path, generation: int) -> _Header:
    with log_path(folder, generation).open("rb") as file:
        line = file.readline()
    parsed = _parse(line)
    if parsed is None or parsed[0] != _HEADER:
        raise OSError("a log of results has no header")
    return msgspec.json.decode(line[parsed[2] :], type=_Header)


def _line(kind: bytes, number: int, payload: bytes) -> bytes:
    rest = b"%s %d %s" % (kind, number, payload)
    return b"%s %s\n" % (xxh3_64_hexdigest(rest).encode(), rest)


def _parse(line: bytes) -> tuple[bytes, int, int] | None:
    """Kind, number and where the payload begins; None for a line that is torn, false or not there."""
    if not line.endswith(b"\n") or line[:_CHECKSUM_BYTES] != xxh3_64_hexdigest(line[_CHECKSUM_BYTES + 1 : -1]).encode():
        return None
    kind, number, _ = line[_CHECKSUM_BYTES + 1 :].split(b" ", 2)
    return kind, int(number), _CHECKSUM_BYTES + 1 + len(kind) + 1 + len(number) + 1
