"""Every shipped form compiles for every architecture and keeps within it; attention spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kernels.triton.compile import CompiledForm, shipped
from kernels.triton.registry import SHARED_BYTES

TIMEOUT_S = 900


@pytest.fixture(scope="module")
def forms() -> list[CompiledForm]:
    """Compiled by a process of its own: this one interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ran = subprocess.run(
        [sys.executable, "-m", "kernels.triton.compile", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.stdout, ran.stderr
    return [CompiledForm(**form) for form in json.loads(ran.stdout)]


def test_all_compile_and_fit(forms: list[CompiledForm]) -> None:
    assert {form.name for form in forms} == shipped().keys()
    assert [f"{form.name} sm_{form.architecture}: {form.error}" for form in forms if form.error] == []
    for form in forms:
        assert form.registers > 0
        assert form.shared_bytes <= SHARED_BYTES[form.architecture]


def test_attention_spills_nothing(forms: list[CompiledForm]) -> None:
    attention = [form for form in forms if form.name.startswith(("attend-", "merge-"))]
    assert {form.architecture for form in attention} == {80, 90}
    assert [form.name for form in attention if form.spilled_bytes] == []
