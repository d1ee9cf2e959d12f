"""Random views for property tests of costs and policies."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from services.router.policies.view import WORKER_ROW, PolicyRequest, PolicyView, Pressure, WorkerRows, no_sources

BLOCK_TOKENS = 16


def request_of(prompt_tokens: int, *, sequence: int = 1, priority: int = 0, prefix_key: int = 7) -> PolicyRequest:
    return PolicyRequest(
        prompt_tokens=prompt_tokens,
        block_tokens=BLOCK_TOKENS,
        num_choices=1,
        expected_output_tokens=100.0,
        prefix_key=prefix_key,
        sequence=sequence,
        now_s=50.0,
        priority=priority,
    )


def rows_of(count: int, *, tokens_per_s: float = 2000.0) -> WorkerRows:
    """Idle workers that are all alike but for their names."""
    rows = np.zeros(count, WORKER_ROW)
    rows["block_tokens"], rows["block_bytes"], rows["total_blocks"] = BLOCK_TOKENS, 4e5, 10_000
    rows["step_token_budget"] = rows["step_tokens"] = 256
    rows["max_running"] = 16
    rows["told_s"] = 50.0
    rows["free_blocks"] = 10_000
    rows["prefill_tokens_per_s"], rows["prefill_token_s"] = tokens_per_s, 1 / tokens_per_s
    rows["fixed_s"], rows["decoding_s"], rows["decode_sequence_s"] = 0.005, 0.01, 0.0005
    rows["decode_step_s"], rows["decode_slope_s"] = 0.0155, 0.0005
    rows["context_length"] = 8192
    rows["pace"] = 1.0
    rows["name_hash"] = np.random.default_rng(3).integers(0, 2**63, count).astype(np.uint64)
    return rows


def view_of(rows: WorkerRows, local_blocks: list[int], **pressure: float) -> PolicyView:
    count = len(rows)
    lately = Pressure(np.zeros(count), np.zeros(count), **pressure)
    return PolicyView(rows, np.array(local_blocks, np.int64), no_sources(count), lately)


@st.composite
def views(draw: st.DrawFn, *, prompt_tokens: int) -> PolicyView:
    """Two to six workers with random loads; no pulls."""
    count = draw(st.integers(2, 6))
    rows = rows_of(count)
    for row in rows:
        decoding, begun, waiting = (draw(st.integers(0, most)) for most in (20, 3, 5))
        row["running"], row["decoding"], row["waiting"] = decoding + begun, decoding, waiting
        row["queued_tokens"] = 100.0 * begun + 200.0 * waiting if begun + waiting else 0.0
        row["waiting_by_class"] = (0, 200.0 * waiting, 0)
        row["pending"] = draw(st.integers(0, 3))
        row["pending_tokens"] = row["pending"] * 150.0
        row["pending_by_class"] = (row["pending_tokens"], 0, 0)
        row["told_s"] = 50.0 - draw(st.floats(0.0, 0.3))
        row["free_blocks"] = draw(st.integers(0, 3000))
        row["cached_blocks"] = draw(st.integers(0, 3000))
    usable = (prompt_tokens - 1) // BLOCK_TOKENS
    local = [draw(st.integers(0, usable)) for _ in range(count)]
    view = view_of(rows, local, utilisation=draw(st.floats(0.0, 2.0)), arrivals_per_s=draw(st.floats(0.0, 5.0)))
    view.pressure.window_s[:] = [draw(st.floats(0.0, 100.0)) for _ in range(count)]
    return view
