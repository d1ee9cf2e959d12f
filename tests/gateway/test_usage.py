"""Counting of usage: the ledger over any losses, prices, and the book with a real Redis."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.keys import KeySpace
from services.common.redis_client import REDIS_ERRORS, connect_redis
from services.common.settings import ConfigurationError
from services.common.usage import Usage, UsageKey, usages_of
from services.gateway.usage import book as book_module
from services.gateway.usage import ledger as ledger_module
from services.gateway.usage.book import UsageBook
from services.gateway.usage.file import load_ledger, save_ledger
from services.gateway.usage.ledger import Batch, LedgerState, UsageLedger
from services.gateway.usage.prices import ModelPrices, Prices, parse_prices
from tests.support.valkey import Valkey
from tests.support.waiting import eventually, eventually_async

KEYS = [UsageKey(day, tenant, "m") for day in ("2026-01-01", "2026-01-02") for tenant in ("a", "b")]
# What becomes of a batch that is sent.
ARRIVES, ANSWER_LOST, LOST = "arrives", "answer lost", "lost"
STEPS = st.one_of(
    st.tuples(st.just("use"), st.sampled_from(KEYS), st.integers(1, 9)),
    st.tuples(st.just("send"), st.sampled_from((ARRIVES, ANSWER_LOST, LOST)), st.none()),
    st.tuples(st.sampled_from(("redis forgets", "restart")), st.none(), st.none()),
)


class FakeRedis:
    """What the script add_usage makes of batches."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.number, self.sums = 0, dict[UsageKey, Usage]()

    def take(self, batch: Batch) -> bool:
        if self.number >= batch.number:
            return True
        if self.number == 0 and not batch.is_whole:
            return False
        for key, usage in batch.rows:
            self.sums[key] = self.sums.get(key, Usage()) + usage
        self.number = batch.number
        return True


class Gateway:
    """A ledger, its file, and a Redis. `used`: what the file or Redis certainly has, or the ledger in memory."""

    def __init__(self) -> None:
        self.redis, self.ledger = FakeRedis(), UsageLedger(LedgerState("one"))
        self.used, self.unsaved = dict[UsageKey, Usage](), list[tuple[UsageKey, Usage]]()
        self.file = msgspec.json.encode(self.ledger.state)

    def use(self, key: UsageKey, count: int) -> None:
        usage = Usage(requests=1, output_tokens=count, cost_nano=count * 10**18)
        self.ledger.add(key, usage)
        self.unsaved.append((key, usage))

    def send(self, fate: str) -> None:
        batch = self.ledger.batch()
        self.file = msgspec.json.encode(self.ledger.state)
        for key, usage in self.unsaved:
            self.used[key] = self.used.get(key, Usage()) + usage
        self.unsaved.clear()
        if batch is None or fate == LOST:
            return
        is_known = self.redis.take(batch)
        if fate == ARRIVES:
            self.ledger.arrived() if is_known else self.ledger.forgotten()

    def restart(self) -> None:
        self.ledger = UsageLedger(msgspec.json.decode(self.file, type=LedgerState))
        self.unsaved.clear()


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=40))
def test_everything_that_was_kept_is_counted_once(steps: list[tuple[str, object, object]]) -> None:
    gateway = Gateway()
    for step, what, count in steps:
        match step:
            case "use":
                assert isinstance(what, UsageKey)
                assert isinstance(count, int)
                gateway.use(what, count)
            case "send":
                gateway.send(str(what))
            case "restart":
                gateway.restart()
            case _:
                gateway.redis.forget()
    for _ in range(3):
        gateway.send(ARRIVES)
    if gateway.redis.number or not gateway.used:
        assert gateway.redis.sums == gateway.used
    else:
        # A Redis that has forgotten all hears of it with what is used next.
        gateway.use(KEYS[0], 1)
        for _ in range(2):
            gateway.send(ARRIVES)
        assert gateway.redis.sums == gateway.used
    assert not gateway.ledger.untold


def test_rows_are_bounded_and_nothing_is_lost_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ROWS", 3)
    ledger = UsageLedger(LedgerState("one"))
    for number in range(10):
        ledger.add(UsageKey("2026-01-01", f"t{number}", "m"), Usage(requests=1))
    assert ledger.untold == Usage(requests=10)
    assert len(ledger.state.total) == 4
    ledger.batch()
    ledger.arrived()
    ledger.drop_before("2026-01-02")
    assert ledger.state.total == []


def test_beyond_the_bound_the_oldest_days_that_were_told_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ROWS", 4)
    ledger, told = UsageLedger(LedgerState("one")), dict[UsageKey, Usage]()
    for day in range(1, 9):
        for tenant in ("a", "b"):
            ledger.add(UsageKey(f"2026-01-0{day}", tenant, "m"), Usage(requests=1))
        batch = ledger.batch()
        assert batch is not None
        told |= dict(batch.rows)
        ledger.arrived()
    assert told == {UsageKey(f"2026-01-0{day}", one, "m"): Usage(requests=1) for day in range(1, 9) for one in "ab"}
    assert {key.day for key, _ in ledger.state.total} == {"2026-01-07", "2026-01-08"}
    # What Redis has not been told of stays.
    for tenant in ("a", "b", "c"):
        ledger.add(UsageKey("2026-01-09", tenant, "m"), Usage(requests=1))
    ledger.batch()
    ledger.add(UsageKey("2026-01-10", "a", "m"), Usage(requests=1))
    ledger.add(UsageKey("2026-01-10", "b", "m"), Usage(requests=1))
    assert {key for key, _ in ledger.state.total} == {
        *(UsageKey("2026-01-09", tenant, "m") for tenant in "abc"),
        UsageKey("2026-01-10", "a", "m"),
        UsageKey("2026-01-10", ledger_module.OTHER, ledger_module.OTHER),
    }
    assert ledger.untold == Usage(requests=5)


def test_prices_by_model_are_exact_and_wrong_files_are_named(tmp_path: Path) -> None:
    text = """
    [default]
    prompt_million = 0.1
    [models."m"]
    cached_million = 0.03
    output_million = 0.7
    request = 0.0001
    accelerator_hour = 3.6
    """
    prices = parse_prices(text)
    usage = Usage(requests=1, prompt_tokens=10, cached_local=3, cached_ssd=1, output_tokens=7, accelerator_us=2_000_000)
    # 6 prompt tokens, 4 cached ones, 7 of output, a request, two seconds.
    assert prices["m"].cost_nano(usage) == 600 + 120 + 4900 + 100_000 + 2_000_000
    assert prices[""].cost_nano(usage) == 1000
    assert ModelPrices().cost_nano(usage) == 0
    for wrong in ("x = 1", "[default]\nprompt = 1", "[models.m]\nrequest = -1", "models = 3", "["):
        with pytest.raises(ConfigurationError):
            parse_prices(wrong)
    path = tmp_path / "prices.toml"
    path.write_text(text)
    watched = Prices(path)
    assert watched.of("m", 0.0).request == 0.0001
    path.write_text("[default]\nrequest = 2.0\n")
    assert watched.of("m", 10.0).request == 2.0
    path.write_text("[default]\nrequest = true\n")
    assert watched.of("m", 20.0).request == 2.0


@asynccontextmanager
async def book(url: str, path: Path | None = None) -> AsyncIterator[UsageBook]:
    """One that tells Redis; killed without a last word."""
    client = connect_redis(url)
    made = UsageBook(client, Prices(None), path)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


async def counted(url: str) -> dict[tuple[str, str], Usage]:
    client = connect_redis(url)
    try:
        day = datetime.now(UTC).date().isoformat()
        found = usages_of(day, await client.hgetall(KeySpace().usage().day(day)))
        return {(key.tenant, key.model): usage for key, usage in found.items()}
    finally:
        await client.aclose()


async def is_counted(url: str, expected: dict[tuple[str, str], Usage]) -> bool:
    try:
        return await counted(url) == expected
    except REDIS_ERRORS:
        return False


ONE = Usage(requests=1, prompt_tokens=10, output_tokens=5)


async def test_gateways_add_up_and_a_run_is_counted_by_what_was_told_of_it(valkey: Valkey) -> None:
    async with book(valkey.url) as first, book(valkey.url) as second:
        for made in (first, second):
            made.count("a", "m", ONE)
            made.count("b", "n", Usage(requests=1, prompt_tokens=1))
        # Its reader left, came back elsewhere and read on, and once more.
        first.count("a", "k", ONE, run="r1")
        await eventually_async(lambda: _has_told(first))
        for tokens in (9, 9, 7):
            second.count("a", "k", Usage(requests=1, prompt_tokens=10, output_tokens=tokens), run="r1")
        second.count("a", "k", ONE, run="r2")
        expected = {
            ("a", "m"): Usage(requests=2, prompt_tokens=20, output_tokens=10),
            ("b", "n"): Usage(requests=2, prompt_tokens=2),
            ("a", "k"): Usage(requests=2, prompt_tokens=20, output_tokens=14),
        }
        await eventually_async(lambda: is_counted(valkey.url, expected))
        assert first.num_untold == 0


async def test_a_run_that_redis_has_not_heard_of_outlives_its_gateway() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    valkey, path = Valkey(folder), folder / "usage.json"
    more = ONE + Usage(output_tokens=2)
    try:
        async with book(valkey.url, path) as made:
            # Redis is not there yet.
            made.count("a", "m", ONE, run="r1")
            await eventually_async(lambda: _is_file(path))
        valkey.start()
        async with book(valkey.url, path) as made:
            made.count("a", "n", more, run="r1")
            expected = {("a", "m"): ONE, ("a", "n"): Usage(output_tokens=2)}
            await eventually_async(lambda: is_counted(valkey.url, expected))
            await eventually_async(lambda: _has_told(made))
    finally:
        valkey.stop()


async def _has_told(made: UsageBook) -> bool:
    return made.num_untold == 0


async def test_counts_survive_redis_and_the_gateway() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvm-"))
    valkey = Valkey(folder)
    path = folder / "usage.json"
    try:
        async with book(valkey.url, path) as made:
            # Redis is not there yet.
            made.count("a", "m", ONE)
            await eventually_async(lambda: _is_file(path))
        valkey.start()
        # A gateway started anew tells what the last one had counted.
        async with book(valkey.url, path) as made:
            await eventually_async(lambda: is_counted(valkey.url, {("a", "m"): ONE}))
            valkey.restart()
            made.count("a", "m", ONE)
            await eventually_async(lambda: is_counted(valkey.url, {("a", "m"): ONE + ONE}))
            assert path.stat().st_mode & 0o777 == 0o600
        (folder / "wrong").write_text("[]")
        with pytest.raises(ConfigurationError, match="usage_file"):
            UsageBook(connect_redis(valkey.url), Prices(None), folder / "wrong")
    finally:
        valkey.stop()


def test_a_file_that_was_saved_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "usage.json", list[tuple[bool, bool]]()

    def note(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    save_ledger(path, LedgerState("one", number=3))
    # What it holds before it has its name, and then the name.
    assert synced == [(False, False), (True, True)]
    assert load_ledger(path).number == 3


async def test_a_save_whose_caller_was_cancelled_does_not_undo_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, began, may_go_on = tmp_path / "usage.json", threading.Event(), threading.Event()

    def slow(path: Path, state: LedgerState) -> None:
        if not began.is_set():
            began.set()
            assert may_go_on.wait(60)
        save_ledger(path, state)

    monkeypatch.setattr(book_module, "save_ledger", slow)
    # Nobody listens there.
    client = connect_redis("redis://127.0.0.1:1")
    made = UsageBook(client, Prices(None), path)
    task = asyncio.create_task(made.run())
    made.count("a", "m", ONE)
    await eventually(began.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    made.count("a", "m", ONE)
    closing = asyncio.create_task(made.close())
    # As long as a save takes that waits for no other.
    await asyncio.wait({closing}, timeout=0.5)
    may_go_on.set()
    await closing
    await asyncio.get_running_loop().shutdown_default_executor()
    assert sum((usage for _, usage in load_ledger(path).total), Usage()) == ONE + ONE
    await client.aclose()


async def _is_file(path: Path) -> bool:
    return path.exists()
