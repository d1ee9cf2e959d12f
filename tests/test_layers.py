"""Who may import whom, and that the generated stubs are those of the protos."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gateway", "router", "kvstore", "worker")
# Heavy or exclusive packages and the only parts of the tree that may import them.
OWNERS = {
    "ucxx": ("services/common/transfer", "services/worker/mover", "services/kvstore"),
    "torch": ("services/worker", "kernels"),
    "triton": ("kernels",),
    "llguidance": ("services/common/grammars", "services/gateway", "services/worker"),
}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(folder: str, forbidden: tuple[str, ...]) -> list[str]:
    """Imports of `forbidden` packages below a folder, as "file: module"."""
    return [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in imports(path)
        if any(module == name or module.startswith(name + ".") for name in forbidden)
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service: str) -> None:
    others = tuple(f"services.{other}" for other in (*SERVICES, "cli") if other != service)
    assert violations(f"services/{service}", (*others, "deploy", "bench", "tests")) == []


def test_what_is_shared_imports_no_service() -> None:
    services = tuple(f"services.{service}" for service in (*SERVICES, "cli"))
    assert violations("services/common", (*services, "kernels", "deploy", "bench", "tests")) == []


def test_the_command_line_imports_no_service() -> None:
    assert violations("services/cli", tuple(f"services.{service}" for service in SERVICES)) == []


def test_kernels_import_nothing_of_ours() -> None:
    assert violations("kernels", ("services", "kvmesh", "deploy", "bench", "tests")) == []


def test_nothing_imports_tests() -> None:
    folders = ("services", "kernels", "deploy", "bench")
    assert [found for folder in folders for found in violations(folder, ("tests",))] == []


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_stay_where_they_belong(package: str) -> None:
    found = [line for folder in ("services", "kernels", "deploy", "bench") for line in violations(folder, (package,))]
    assert [line for line in found if not line.startswith((*OWNERS[package], "bench/"))] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("services.worker.__main__", ("torch", "ucxx")),
        ("services.gateway.server", ("torch", "ucxx")),
        ("services.router.__main__", ("torch", "ucxx")),
        ("services.kvstore.__main__", ("torch",)),
        ("services.cli.main", ("torch", "ucxx", "transformers")),
        ("services.worker.mover.service", ("torch",)),
        ("services.worker.engine.loop", ("ucxx",)),
    ],
)
def test_a_process_does_not_load(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({set(forbidden)!r} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_the_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    # In a process of its own: protoc waits for its plugins with select(), which knows no descriptor above 1023.
    command = [sys.executable, str(ROOT / "protos" / "generate.py"), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    made = {path.name: path.read_text() for path in (tmp_path / "kvmesh" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "protos/kvmesh/v1").glob("*_pb2*") if path.is_file()}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == [], "run `python protos/generate.py`"
