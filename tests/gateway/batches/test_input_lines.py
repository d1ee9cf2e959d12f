"""What is found wrong with a file before any of its lines runs, and that its lines are found again."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.batches.input_lines import MAX_LINE_BYTES, check_lines

ENDPOINT = "/v1/completions"


def request(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}, **changes}


def checked(path: Path, data: bytes, max_lines: int = 100) -> list[tuple[str, int | None]]:
    (path / "input").write_bytes(data)
    return [(error.code, error.line) for error in check_lines(path / "input", ENDPOINT, max_lines).errors]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b'{"body":' + b"[" * 100_000, "invalid_json_line"),
        (b"[]", "invalid_request"),
        (b'{"custom_id":"b"}', "invalid_request"),
        (request(custom_id=""), "invalid_custom_id"),
        (request(custom_id="b" * 513), "invalid_custom_id"),
        (request("b", method="GET"), "invalid_method"),
        (request("b", url="/v1/chat/completions"), "mismatched_endpoint"),
        (request("b", body="text"), "invalid_request"),
        (request("b", body=None), "invalid_request"),
        (request("a"), "duplicate_custom_id"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes | dict[str, Any], code: str) -> None:
    wrong = line if isinstance(line, bytes) else json.dumps(line).encode()
    assert checked(tmp_path, json.dumps(request("a")).encode() + b"\n\n" + wrong + b"\n") == [(code, 3)]


def test_files_that_are_wrong_as_a_whole(tmp_path: Path) -> None:
    assert checked(tmp_path, b"") == [("empty_file", None)]
    assert checked(tmp_path, b"\n \n") == [("empty_file", None)]
    three = b"\n".join(json.dumps(request(name)).encode() for name in "abc")
    assert checked(tmp_path, three, max_lines=2) == [("too_many_lines", None)]
    assert checked(tmp_path, three) == []
    assert checked(tmp_path, b" " * (MAX_LINE_BYTES + 1))[0] == ("line_too_long", 1)
    assert len(checked(tmp_path, b"{\n" * 1000, max_lines=2000)) == 50


@settings(max_examples=25, deadline=None)
@given(
    bodies=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), min_size=1, max_size=20),
    ends=st.sampled_from([b"\n", b"\r\n", b"\n\n \n"]),
)
def test_every_line_is_found_again(bodies: list[dict[str, str]], ends: bytes) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / "input"
        lines = [json.dumps(request(f"id {i}", body=body)).encode() for i, body in enumerate(bodies)]
        path.write_bytes(ends.join(lines))
        found = check_lines(path, ENDPOINT, 100)
        assert (found.errors, len(found)) == ([], len(bodies))
        for i in reversed(range(len(bodies))):
            line = found.read(i)
            assert (line.custom_id, json.loads(bytes(line.body))) == (f"id {i}", bodies[i])
