"""Regenerates the Python stubs beside the .proto files: `python protos/generate.py`."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
# Plugins of this interpreter's environment, activated or not.
PLUGINS = Path(sys.executable).parent


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every proto under `out`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kvmesh/v1/*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    google_api = str(Path(str(files("google.api"))).parent.parent)
    code = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy={PLUGINS / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={PLUGINS / 'protoc-gen-mypy_grpc'}",
            f"-I{ROOT}",
            f"-I{well_known}",
            f"-I{google_api}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
