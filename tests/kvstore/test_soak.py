"""Ten times what a node holds goes through it, and it stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.kv_probe import Sample
from bench.kv_soak import Plan, Soak, violations
from tests.support.valkey import Valkey

_PLAN = Plan(
    num_blocks=10_000,
    block_bytes=16 * 1024,
    ram_bytes=4 * 2**20,
    ssd_bytes=11 * 2**20,
    ssd_segment_bytes=2**20,
    restarts=2,
    restarts_share=0.2,
    clear_every=50,
    sample_every_s=0.1,
)


async def test_nothing_grows(tmp_path: Path, valkey: Valkey) -> None:
    run = Soak(_PLAN, tmp_path, valkey.url)
    await run.run()
    assert violations(_PLAN, run.samples, run.highest) == []
    assert run.done.pushed_blocks >= 10 * _PLAN.capacity_blocks
    assert run.done.restarts == _PLAN.restarts
    assert run.done.clears > 0
    assert run.done.cleared_blocks > 0
    assert 0 < run.done.pulled_blocks < run.done.asked_blocks
    assert run.samples[-1].ssd_blocks > _PLAN.ram_bytes // _PLAN.block_bytes


_STEADY = Sample(rss_mib=100, anonymous_mib=70, open_files=40, ssd_files=20, ssd_mib=8, redis_changes=10)


def test_what_goes_up_and_down_is_no_growth() -> None:
    other = replace(_STEADY, anonymous_mib=73, open_files=43, ssd_files=22, ssd_mib=7, redis_changes=4100)
    assert violations(_PLAN, [_STEADY, other] * 15, _STEADY.highest(other)) == []


@pytest.mark.parametrize(
    ("what", "step"),
    [("anonymous_mib", 0.5), ("open_files", 1), ("ssd_files", 1), ("redis_keys", 1), ("redis_changes", 500)],
)
def test_growth_is_found(what: str, step: float) -> None:
    samples = [replace(_STEADY, **{what: getattr(_STEADY, what) + step * number}) for number in range(30)]
    assert [line.split()[0] for line in violations(_PLAN, samples, samples[-1])] == [what]


def test_bounds_hold_at_every_moment() -> None:
    highest = replace(_STEADY, ssd_mib=12, ram_blocks=1000, redis_blocks=2000)
    found = violations(_PLAN, [_STEADY] * 10, highest)
    assert [line.split()[0] for line in found] == ["ram_blocks", "ssd_mib", "redis_blocks"]


def test_too_short_a_run_says_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        violations(_PLAN, [_STEADY], _STEADY)
