"""Compiling: keyed by sources, atomic, and honest when there is no compiler."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, library, probe
from kernels.cpu.packing import pack_linear
from kernels.cpu.structs import linear_struct
from kernels.paged_attention import paged_attention

from .batches import make_batch, make_pool

PORTABLE_TARGET = "x86-64-v3"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.mkdir()
    monkeypatch.setattr(build, "cache_dirs", lambda: (package, cache))
    return package, cache


def test_name_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    for source in build.SOURCE_DIR.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.library_name() == before
    with (tmp_path / build.MAIN_SOURCE).open("a") as file:
        file.write("// changed\n")
    assert build.library_name() != before


def test_an_existing_library_is_used(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ())
    folders[1].mkdir()
    library = folders[1] / build.library_name()
    library.touch()
    assert build.find_or_build() == library


def test_no_compiler(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.find_or_build()


def test_a_failed_compilation_leaves_nothing(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.find_or_build()
    assert list(folders[0].iterdir()) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86-64 target")
def test_the_portable_form_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", [flag.replace("native", PORTABLE_TARGET) for flag in build.FLAGS])
    monkeypatch.setattr(build, "cache_dirs", lambda: (tmp_path, tmp_path))
    portable = ctypes.CDLL(str(build.find_or_build()))
    monkeypatch.setattr(library, "library", lambda: portable)
    assert library.instruction_set() == "portable"
    batch = make_batch([(1, 70), (20, 40), (1, 600)], 50)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    packed, out = pack_linear(weight), torch.empty(7, 48)
    library.linear(x, linear_struct(packed), library.Epilogue.STORE, out, num_threads=2)
    torch.testing.assert_close(out, x.float() @ weight.float().T, atol=1e-4, rtol=1e-5)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        pool = make_pool(batch, (3, 1, 64), 50, dtype)
        query = torch.randn(batch.num_tokens, 9, 64).to(dtype)
        found = library.paged_attention(query, pool, 0, batch, scale=0.125, num_threads=2)
        expected = paged_attention(query, pool, 0, batch, scale=0.125)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_the_machine_is_measured() -> None:
    """Between what nothing is slower than and what nothing reaches."""
    assert 1e8 < probe.read_bytes_per_s(1) < 1e12
    for products in ("float32", "bfloat16", "int8"):
        assert 1e8 < probe.operations_per_s(products, 1) < 1e13
