"""What `bench.kv_ttft` makes of its samples."""

from __future__ import annotations

from bench.kv_ttft import PREFIX_TOKENS, Sample, summary


def test_only_what_came_whole_from_a_tier_counts_for_it() -> None:
    samples = [
        Sample("computed", 1.0, {"local": 0.0, "ram": 0.0}),
        Sample("computed", 3.0, {}),
        # A block of it was in the pool.
        Sample("computed", 0.9, {"local": 16.0}),
        Sample("ram", 0.1, {"ram": float(PREFIX_TOKENS)}),
        Sample("ram", 0.7, {"ram": PREFIX_TOKENS - 16.0, "local": 16.0}),
        Sample("ssd", 0.5, {"ssd": 16.0, "ram": PREFIX_TOKENS - 16.0}),
    ]
    rows = {row["tier"]: row for row in summary(samples)}
    assert set(rows) == {"computed", "ram"}
    assert (rows["computed"]["ttft_ms"], rows["computed"]["samples"], rows["computed"]["mixed"]) == (2000.0, 2, 1)
    assert (rows["ram"]["ttft_ms"], rows["ram"]["ratio"], rows["ram"]["mixed"]) == (100.0, 20.0, 1)
