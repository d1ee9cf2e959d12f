"""The lines of an input file: checked as a whole before any of them runs, and found again by number.

A batch whose file is not in order fails before it begins, with an error for each wrong line. What only running a line
can tell (its body, its model) is the line's own error.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.gateway.batches.records import LineError

MAX_LINE_BYTES = 8 * 2**20
MAX_CUSTOM_ID_CHARACTERS = 512
_MAX_ERRORS = 50
# The event loop has its turn between so many lines.
_LINES_AT_A_TIME = 32
_PAUSE_S = 0.0005


class InputLine(msgspec.Struct, frozen=True):
    """One request. body: of an HTTP request, as it is."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(slots=True)
class InputLines:
    """Where the lines of a file are, those without content aside. Numbers count from 0."""

    path: Path
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    errors: list[LineError] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> InputLine:
        """A line of a file without errors. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            return _decoder.decode(file.readline())


_decoder = msgspec.json.Decoder(InputLine)


def check_lines(path: Path, endpoint: str, max_lines: int) -> InputLines:
    """All lines of a file, and what is wrong with them: the first of many errors. Raises OSError."""
    lines, custom_ids = InputLines(path), set[str]()
    with path.open("rb") as file:
        number = at = 0
        while len(lines.errors) < _MAX_ERRORS and len(lines) <= max_lines:
            if not (raw := file.readline(MAX_LINE_BYTES + 1)):
                break
            number += 1
            if number % _LINES_AT_A_TIME == 0:
                time.sleep(_PAUSE_S)
            if len(raw) > MAX_LINE_BYTES:
                lines.errors.append(LineError("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes", number))
                break
            if raw.strip():
                lines.offsets.append(at)
                error = _error_of(raw, number, endpoint, custom_ids)
                if error is not None:
                    lines.errors.append(error)
            at += len(raw)
    lines.errors += _errors_of_all(len(lines), max_lines)
    return lines


def _errors_of_all(count: int, max_lines: int) -> list[LineError]:
    if not count:
        return [LineError("empty_file", "The file has no requests.")]
    if count > max_lines:
        return [LineError("too_many_lines", f"A batch has at most {max_lines} requests.")]
    return []


def _error_of(raw: bytes, number: int, endpoint: str, custom_ids: set[str]) -> LineError | None:
    """What is wrong with a line; its custom_id is taken otherwise."""
    try:
        line = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        return LineError("invalid_request", f"The line is not a request: {error}.", number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError("invalid_json_line", "The line is not valid JSON.", number)
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = f"custom_id has 1 to {MAX_CUSTOM_ID_CHARACTERS} characters."
        return LineError("invalid_custom_id", message, number, "custom_id")
    if line.method != "POST":
        return LineError("invalid_method", "method must be POST.", number, "method")
    if line.url != endpoint:
        return LineError("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}.", number, "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        return LineError("invalid_request", "body must be an object.", number, "body")
    if line.custom_id in custom_ids:
        return LineError("duplicate_custom_id", "An earlier line has this custom_id.", number, "custom_id")
    custom_ids.add(line.custom_id)
    return None
