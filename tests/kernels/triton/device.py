"""Where these tests run: interpreted on CPU tensors, or compiled on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import triton

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
