"""How long a process may be silent, by what it has said before, with answers that the test gives."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.cli import watchdog
from services.cli.watchdog import until_silent

SILENCE_S, START_LIMIT_S = 0.2, 0.6


class Answers:
    """Asked, it does what comes next: answers, refuses, or says nothing from then on."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.asked = 0
        self.closed = False

    async def ask(self) -> None:
        self.asked += 1
        if not self._answers:
            await asyncio.Event().wait()
        if self._answers.pop(0) == "refusal":
            raise ConnectionError

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "_LOOKS", 2)
    monkeypatch.setattr(watchdog, "_TURN_S", 0.02)


async def silence(asked: Answers, *, spoke: bool = False, stopped: bool = False) -> float:
    return await until_silent(
        asked,
        start_limit_s=START_LIMIT_S,
        silence_s=SILENCE_S,
        spoke=lambda: spoke,
        stopped=lambda: stopped,
    )


@pytest.mark.parametrize(
    ("answers", "spoke", "limit_s"),
    [
        ((), False, START_LIMIT_S),
        ((), True, SILENCE_S),
        (("refusal",) * 3, False, START_LIMIT_S),
        (("refusal",) * 3, True, SILENCE_S),
        (("answer",), False, SILENCE_S),
        (("refusal", "answer", "answer"), False, SILENCE_S),
        (("answer", "refusal"), False, SILENCE_S),
        (("answer", *("refusal",) * 10**4), True, START_LIMIT_S),
    ],
)
async def test_silence_after(answers: tuple[str, ...], spoke: bool, limit_s: float) -> None:
    asked = Answers(*answers)
    started_s = time.monotonic()
    assert await silence(asked, spoke=spoke) == limit_s
    assert time.monotonic() - started_s >= limit_s
    assert asked.closed


async def test_who_answers_is_asked_for_ever() -> None:
    asked = Answers(*("answer",) * 10**4)
    watch = asyncio.create_task(silence(asked))
    async with asyncio.timeout(60):
        while asked.asked < SILENCE_S / watchdog._LOOK_S:
            await asyncio.sleep(0.01)
    assert not watch.done()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert asked.closed


async def test_who_is_stopped_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOKS", 10**6)
    async with asyncio.timeout(60):
        assert await silence(Answers("answer"), stopped=True) == SILENCE_S


async def test_a_pause_of_our_own_is_no_silence() -> None:
    asked = Answers("answer")
    watch = asyncio.create_task(silence(asked))
    async with asyncio.timeout(60):
        while asked.asked < 2:
            await asyncio.sleep(0)
    time.sleep(2 * SILENCE_S)  # noqa: ASYNC251
    await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
