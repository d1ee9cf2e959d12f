"""Launch configurations of attention timed against each other, as candidates for the stored table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu_kernels import Shape, attention_cases
from bench.gpu_measure import Limits, Timer
from kernels.triton.attention_configs import AttentionConfig


def candidates(kind: str, group: int) -> Iterator[AttentionConfig]:
    """What is tried for a kind of launch; a tile holds at least one token's heads."""
    rows = (16, 32) if kind == "decode" else (64, 128)
    for block_m, block_n, warps, stages in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 4)):
        if block_m >= group:
            yield AttentionConfig(block_m, block_n, warps, stages)


def sweep(timer: Timer, limits: Limits, shape: Shape, deadline_s: float) -> list[dict[str, Any]]:
    """Every configuration that runs, for each case, fastest first; those that do not fit the device are left out."""
    found: list[dict[str, Any]] = []
    for kind in ("decode", "prefill"):
        for config in candidates(kind, shape.heads // shape.kv_heads):
            for name, case in attention_cases(timer, limits, shape, config):
                if kind not in name or time.monotonic() > deadline_s:
                    continue
                try:
                    row = case()
                except Exception as failure:  # too much shared memory, say: no candidate
                    print(f"{name} {config}: {type(failure).__name__}")
                    continue
                shown = {part: getattr(config, part) for part in ("block_m", "block_n", "num_warps", "num_stages")}
                found.append({"case": name, "milliseconds": row.milliseconds, "ratio": row.ratio, **shown})
    return sorted(found, key=lambda one: (one["case"], one["milliseconds"]))
