"""Which attempts would better go on at another worker, as far as the scheduler can see. Pure; part of its state.

Each is told once, and nothing here depends on its going: a preempted one waits for blocks as it would have, and a more
urgent request for its turn. A held attempt has just come and is not asked to leave.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from services.worker.messages import MoveReason
from services.worker.sequence import Request, Sequence


class MoveWishes:
    """Gathers wishes until they are taken."""

    def __init__(self) -> None:
        self._wishes: list[tuple[int, MoveReason]] = []

    def preempted(self, request: Request) -> None:
        """A sequence of `request` has lost its blocks."""
        if _may_ask(request):
            self._wish(request, "short_of_blocks")

    def watch_blocks(self, running: Items[Sequence], num_available: int) -> None:
        """Ask the last of `running` before it is preempted: when not each of them can have a further block.

        One at a time, for what it leaves may be enough.
        """
        if num_available >= len(running) or any(sequence.request.asked_to_move for sequence in running):
            return
        last = next((s.request for s in reversed(running[1:]) if _may_ask(s.request)), None)
        if last is not None:
            self._wish(last, "short_of_blocks")

    def make_room(self, waiting: Request, running: Items[Sequence]) -> None:
        """`waiting` lacks a place or blocks: ask the last of `running`, if that is less urgent. Once for each."""
        if waiting.wanted_room:
            return
        for sequence in reversed(running):
            request = sequence.request
            if request.priority <= waiting.priority:
                return
            if _may_ask(request):
                waiting.wanted_room = True
                self._wish(request, "priority")
                return

    def take(self) -> list[tuple[int, MoveReason]]:
        """Keys and reasons since the last call."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def _wish(self, request: Request, reason: MoveReason) -> None:
        request.asked_to_move = True
        self._wishes.append((request.key, reason))


def _may_ask(request: Request) -> bool:
    return not (request.asked_to_move or request.is_held)
