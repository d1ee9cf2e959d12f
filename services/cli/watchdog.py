"""Finds that a process has fallen silent: stopped, hung or deadlocked.

It is asked every few seconds, and sooner when the kernel says that it is stopped. A question that stays without an
answer for `silence_s` ends the watch. A process that never spoke, or that refuses to talk since it has no port yet or
no longer, starts or ends: it has `start_limit_s`. Time is counted in turns of this process's own loop, so that a
supervisor which was itself stopped for a while takes nobody for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from services.cli.contact import Contact

SILENCE_S = 5.0
# Asking costs supervisor and process some 2 ms of processor time together, looking next to nothing.
_LOOKS = 5
_LOOK_S = 1.0
_TURN_S = 0.25


async def until_silent(
    contact: Contact,
    *,
    start_limit_s: float,
    silence_s: float = SILENCE_S,
    spoke: Callable[[], bool],
    stopped: Callable[[], bool],
) -> float:
    """Ask until nothing has been heard for too long; returns for how long, in seconds. Hangs up at the end.

    spoke: whether others have heard the process; stopped: whether it had better be asked now.
    """
    heard, unanswered, refused = False, 0, 0
    asking = asyncio.ensure_future(contact.ask())
    try:
        while True:
            await asyncio.wait({asking}, timeout=_TURN_S)
            if not asking.done():
                unanswered += 1
                limit_s = silence_s if heard or spoke() else start_limit_s
                if unanswered * _TURN_S >= limit_s:
                    return limit_s
                continue
            unanswered = 0
            if _is_answer(asking):
                heard, refused = True, 0
                await _pause(stopped)
            elif (refused := refused + 1) * _TURN_S >= start_limit_s:
                return start_limit_s
            else:
                await asyncio.sleep(_TURN_S)
            asking = asyncio.ensure_future(contact.ask())
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await asking
        await contact.close()


def _is_answer(asked: asyncio.Future[None]) -> bool:
    try:
        asked.result()
    except ConnectionError:
        return False
    return True


async def _pause(stopped: Callable[[], bool]) -> None:
    """Until it is time to ask again. All watches look at the same moments, which wakes this process less often."""
    for _ in range(_LOOKS):
        await asyncio.sleep(_LOOK_S - time.monotonic() % _LOOK_S)
        if stopped():
            return
