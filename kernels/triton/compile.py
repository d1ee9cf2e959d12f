"""Ahead-of-time compilation of every shipped form, for machines without a GPU: does it compile, and what does it use?

`python -m kernels.triton.compile` prints a table (`--json`: a list); exit status 1 where a form is not as it must be.
`--only` takes those whose name contains a word. Forms come from the `SHIPPED` lists (registry.py). Registers and spills
are read from the machine code, so they are those of the compiler that came with Triton.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.triton
from kernels.triton.registry import SHARED_BYTES, KernelConfig

WARP_THREADS = 32
TIMEOUT_S = 600.0
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """What a form uses on an architecture; error: why it may not ship, empty where it may."""

    name: str
    architecture: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    seconds: float
    error: str


def shipped(only: str = "") -> dict[str, KernelConfig]:
    """Every shipped form by name. Raises ValueError where two have one name."""
    forms: dict[str, KernelConfig] = {}
    for module in pkgutil.iter_modules(kernels.triton.__path__, "kernels.triton."):
        for form in getattr(importlib.import_module(module.name), "SHIPPED", ()):
            if form.name in forms:
                raise ValueError(f"two forms are named {form.name}")
            forms[form.name] = form
    return {name: form for name, form in forms.items() if only in name}


def compile_form(name: str, architecture: int) -> CompiledForm:
    """Compile one form. Never raises for what is wrong with the form."""
    form = shipped()[name]
    start = time.perf_counter()
    registers = spilled = shared = 0
    try:
        compiled = triton.compile(
            source(form), target=GPUTarget("cuda", architecture, WARP_THREADS), options=options(form)
        )
        shared = int(compiled.metadata.shared)
        registers, spilled = resources(compiled.asm["cubin"])
        error = _objection(architecture, spilled, shared)
    except Exception as failure:  # whatever the compiler raises is the form's result
        error = f"{type(failure).__name__}: {failure}"
    seconds = round(time.perf_counter() - start, 2)
    return CompiledForm(name, architecture, registers, spilled, shared, form.num_warps, form.num_stages, seconds, error)


def source(form: KernelConfig) -> Any:
    """What Triton compiles: argument types, constants, and which arguments are multiples of 16."""
    kernel: Any = form.kernel
    names = kernel.arg_names
    unknown = {*form.signature, *form.constants, *form.aligned} ^ set(names)
    if unknown:
        raise ValueError(f"{form.name}: arguments that are missing or not the kernel's: {sorted(unknown)}")
    return ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in form.constants else form.signature[name] for name in names},
        constexprs=dict(form.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in form.aligned},
    )


def options(form: KernelConfig) -> dict[str, object]:
    """Launch options as the compiler takes them."""
    return {"num_warps": form.num_warps, "num_stages": form.num_stages, **form.options}


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes it keeps in memory for want of them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        ).stdout
    found = _USAGE.search(told)
    if found is None:
        raise ValueError(f"no resource usage in {told!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _objection(architecture: int, spilled: int, shared: int) -> str:
    if shared > SHARED_BYTES[architecture]:
        return f"{shared} bytes of shared memory, {SHARED_BYTES[architecture]} at most"
    return f"{spilled} bytes of spilled registers" if spilled else ""


def compile_all(only: str, num_processes: int) -> list[CompiledForm]:
    """All forms for all their architectures, in processes of their own."""
    tasks = [(form.name, architecture) for form in shipped(only).values() for architecture in form.architectures]
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-triton-") as cache,
        ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_prepare, initargs=(cache,)) as pool,
    ):
        waiting = [pool.submit(compile_form, *task) for task in tasks]
        done = [future.result() for future in as_completed(waiting, timeout=TIMEOUT_S)]
    return sorted(done, key=lambda form: (form.name, form.architecture))


def _prepare(cache: str) -> None:
    triton.knobs.cache.dir = cache


def table(forms: list[CompiledForm]) -> Iterator[str]:
    """The lines of the table."""
    width = max((len(form.name) for form in forms), default=0)
    yield f"{'form':{width}}  arch  registers  spilled B  shared B  warps  stages  seconds"
    for form in forms:
        yield (
            f"{form.name:{width}}  sm_{form.architecture}  {form.registers:9}  {form.spilled_bytes:9}  "
            f"{form.shared_bytes:8}  {form.num_warps:5}  {form.num_stages:6}  {form.seconds:7.1f}  {form.error}"
        ).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compile", description=__doc__)
    parser.add_argument("--only", default="", help="forms whose name contains this")
    parser.add_argument("--json", action="store_true", help="a list instead of a table")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: this process interprets kernels and cannot compile them")
    forms = compile_all(chosen.only, chosen.processes)
    print(json.dumps([asdict(form) for form in forms], indent=1) if chosen.json else "\n".join(table(forms)))
    return 1 if any(form.error for form in forms) or not forms else 0


if __name__ == "__main__":
    sys.exit(main())
