"""Triton kernels run in its interpreter here; that is decided when triton is first imported, hence before any test."""

from __future__ import annotations

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
