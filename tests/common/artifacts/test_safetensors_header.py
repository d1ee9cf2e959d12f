"""Headers of safetensors files: what a valid one says, and every lie refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.safetensors_header import read_safetensors_header


def write(path: Path, header: Any, data: bytes = bytes(24), length: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def test_what_the_format_s_own_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    found = {one.name: one for one in read_safetensors_header(tmp_path / "f")}
    assert {name: one.shape for name, one in found.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    data = (tmp_path / "f").read_bytes()
    a = found["a"]
    assert data[a.offset : a.offset + a.size] == tensors["a"].numpy().tobytes()
    assert a.dtype == "I64"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 24)}, "b overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 24)}, "b leaves a gap"),
        ({"a": entry(0, 28)}, "ends at byte"),
        ({"a": entry(0, 20)}, "the tensors end at byte"),
        ({"a": entry(0, 24, shape=[5])}, "24 bytes for F32"),
        ({"a": entry(0, 24, dtype="F4")}, "dtype 'F4'"),
        ({"a": entry(0, 24, shape=[-6, -1])}, "no counts"),
        ({"a": entry(0, 24, shape=[2**62, 2**62])}, "no counts"),
        ({"a": entry(0, 24, shape=[True])}, "no counts"),
        ({"a": entry(0, 24, shape="24")}, "no counts"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "no dtype, shape or data_offsets"),
        ({"a": 3}, "no dtype"),
        ([], "no JSON object"),
        (b"{" * 5000, "not a readable"),
        (b"\xff{}", "not a readable"),
    ],
)
def test_lies(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(InvalidArtifact, match=message) as refused:
        read_safetensors_header(write(tmp_path / "f", header))
    assert str(refused.value).startswith("f is not a readable safetensors file: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [2**63, 2**40, 25 + 2])
def test_huge_headers_are_not_believed(tmp_path: Path, length: int) -> None:
    with pytest.raises(InvalidArtifact, match="a header of"):
        read_safetensors_header(write(tmp_path / "f", {}, length=length))


def test_short_files(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", {"a": entry(0, 24)}).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:size])
        with pytest.raises(InvalidArtifact):
            read_safetensors_header(tmp_path / "f")


@given(data=st.binary(max_size=200), position=st.integers(0, 100), bit=st.integers(0, 7))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, position: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "f"
    good = bytearray(write(path, {"a": entry(0, 24), "b": entry(24, 24)}).read_bytes())
    good[position % len(good)] ^= 1 << bit
    for content in (data, bytes(good)):
        path.write_bytes(content)
        try:
            tensors = read_safetensors_header(path)
        except InvalidArtifact:
            continue
        assert all(0 <= one.offset <= one.offset + one.size <= len(content) for one in tensors)
