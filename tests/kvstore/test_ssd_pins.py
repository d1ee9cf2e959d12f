"""Who removes a segment waits for those who read it, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from services.kvstore.ssd_pins import SegmentPins


async def test_the_last_reader_releases() -> None:
    pins = SegmentPins()
    with pins.held([1, 1, 2]):
        with pins.held([1]):
            await pins.released(3, 0.0)
            waiting = asyncio.create_task(pins.released(1, 5.0))
            with pytest.raises(TimeoutError):
                await pins.released(2, 0.01)
        await asyncio.sleep(0)
        assert not waiting.done(), "another one reads on"
        assert len(pins) == 2
    await waiting
    assert len(pins) == 0


async def test_a_reader_that_fails_releases() -> None:
    pins = SegmentPins()
    with pytest.raises(OSError, match="the disk"), pins.held([7]):
        raise OSError("the disk")
    await pins.released(7, 0.0)
